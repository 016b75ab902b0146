"""What the tests of the commands that look share: a queue under a clock of its own, and commands that read it."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

from jobqueue import Job, Queue
from tests.engine import NOW
from tests.support import FakeClock
from tests.test_cli import CliTestCase, Done


class LookTestCase(CliTestCase):
    """A test with a queue (`self.queue`, in `self.db`); the commands it runs see the same time."""

    clock: FakeClock
    queue: Queue

    def setUp(self) -> None:
        super().setUp()
        self.clock = FakeClock(NOW)
        self.queue = Queue(self.db, create=True, clock=self.clock)
        self.addCleanup(self.queue.close)
        self.queue._store.sqlite.execute("PRAGMA synchronous = OFF")
        for name in ("jobqueue.times.now_ms", "jobqueue.queue.now_ms", "jobqueue.commands.see.now_ms"):
            patch = mock.patch(name, self.clock)
            patch.start()
            self.addCleanup(patch.stop)

    def look(self, command: str, *args: object) -> Done:
        """Run a command on the queue."""
        return self.main(command, "--database", self.db, *args)

    def lines(self, command: str, *args: object) -> list[str]:
        """Run a command that must succeed in silence, and return the lines it prints."""
        done = self.look(command, *args)
        self.assertEqual((done.code, done.err), (0, ""))
        return done.out.splitlines()

    def objects(self, command: str, *args: object) -> list[Any]:
        """Run a command with `--json` and return what it prints."""
        return [json.loads(line) for line in self.lines(command, "--json", *args)]

    def take(self, id: str, worker: str = "w1", lease_seconds: float = 30) -> Job:
        """Claim one job, which must be the one named."""
        (job,) = self.queue.claim(worker, lease_seconds)
        self.assertEqual(job.id, id)
        return job

    def end(self, id: str, error: str | None = None, after_ms: int = 0, final: bool = True) -> None:
        """Claim one job, which must be the one named, and some time later complete it, or fail it."""
        job = self.take(id, lease_seconds=3_600)
        self.clock.advance(after_ms)
        assert job.lease_token is not None
        done = self.queue.complete(id, job.lease_token, {"ok": id}) if error is None else (
            self.queue.fail(id, job.lease_token, error, final=final))
        self.assertTrue(done)

    def worker(self, id: str = "host-7-abc", queues: tuple[str, ...] = ("default",),
               types: tuple[str, ...] = ("t",), allow_exec: bool = False, age_ms: int = 0) -> None:
        """Enter a worker that was last seen so long ago."""
        self.queue._store.worker_arrives(id, host="host", pid=7, queues=queues, types=types, allow_exec=allow_exec,
                                         now_ms=self.clock() - age_ms)
