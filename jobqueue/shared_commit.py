"""Threads that store jobs at the same time share a commit, so that more of them are not slower.

Each puts its job into a common queue and takes a lock.  Whoever has the lock stores what
all have asked for up to then, in one transaction; the others find their answer when it is
their turn.  A thread that is alone pays a microsecond.
"""

from __future__ import annotations

import threading
from collections import deque

from .errors import DatabaseError, InvalidJob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .db import Store
    from .jobs import NewJob


class _Request:
    """A job that a thread wants stored, and what came of it."""

    __slots__ = ("answer", "error", "job")

    def __init__(self, job: NewJob) -> None:
        self.job = job
        self.answer: tuple[str, bool] | None = None
        self.error: Exception | None = None


class SharedCommit:
    """Stores single jobs for the threads of this process."""

    def __init__(self, store: Store, clock: Callable[[], int]) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[_Request] = deque()

    def add(self, job: NewJob) -> tuple[str, bool]:
        """Do what `Store.add` does, in a commit with the jobs of others."""
        _ = self._store.sqlite  # refuses a forked child, which might wait for a thread that it does not have
        request = _Request(job)
        self._waiting.append(request)
        with self._lock:
            if request.answer is None and request.error is None:
                self._store_all([self._waiting.popleft() for _ in range(len(self._waiting))])
        if request.answer is None:
            assert request.error is not None
            raise request.error
        return request.answer

    def _store_all(self, requests: list[_Request]) -> None:
        answers: list[tuple[_Request, tuple[str, bool]]] = []
        try:
            with self._store.transaction():
                now = self._clock()
                for request in requests:
                    try:
                        answers.append((request, self._store.add(request.job, now_ms=now)))
                    except InvalidJob as error:  # nothing of this job was written yet
                        request.error = error
        except BaseException as error:
            shared = error if isinstance(error, Exception) else DatabaseError(
                "another thread was interrupted while it stored this job too; whether it is stored is not known")
            for request in requests:
                request.error = request.error or shared
            raise
        for request, answer in answers:
            request.answer = answer
