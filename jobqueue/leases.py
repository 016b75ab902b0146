"""The moves of a job that is in the file: claim, settle, expire, cancel, retry.

Each is an UPDATE whose WHERE repeats all that makes the move legal: the status, the
current token, a lease that has not run out.  A caller whose lease is gone matches no row,
so nothing changes and the answer is False.  What follows a failure is asked of
`lifecycle`; this module only writes it down.

Complexity: `c` claimed or settled jobs cost O(c log n), whatever else the file holds; a
completion adds the number of its dependents, each edge once.
"""

from __future__ import annotations

import json

from .connection import Connection
from .errors import InvalidJob, UnknownJobError
from .jobs import DEFAULT_QUEUE, MAX_QUEUES, Job, clean_error, encode_json
from .lifecycle import CLAIMABLE, DEAD, ERROR, FAILED, LEASE_EXPIRED, MOVES, after_expiry, after_failure, sources
from .schema import IS_READY, IS_RUNNING, IS_SCHEDULED, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

PROMOTE_CHUNK = 10_000
RECOVER_CHUNK = 1_000
RETRY_CHUNK = 10_000

_COLUMNS = ", ".join(Job.COLUMNS)
_HELD = f"seq = :seq AND lease_token = :token AND {IS_RUNNING} AND lease_expires_at > :now"
"""What must be true for the holder of a lease to do anything with it."""
_END_LEASE = "lease_owner = NULL, lease_token = NULL, lease_expires_at = NULL"

_FROM_AHEAD = "started_at > :now + 1000 AND lease_expires_at > started_at"
"""A lease granted by a clock that was ahead; a second is for processes that read the clock at the same time."""
_LAST_FROM_AHEAD = f"""SELECT 1 FROM (SELECT started_at, lease_expires_at FROM jobs WHERE queue = :queue
                       AND {IS_RUNNING} ORDER BY lease_expires_at DESC LIMIT 1) WHERE {_FROM_AHEAD}"""
_ANY_DUE = f"""
SELECT EXISTS (SELECT 1 FROM jobs WHERE queue = :queue AND {IS_RUNNING} AND lease_expires_at <= :now)
    OR EXISTS (SELECT 1 FROM jobs WHERE queue = :queue AND {IS_SCHEDULED} AND run_at <= :now)
    OR EXISTS ({_LAST_FROM_AHEAD})"""
_PULL_BACK = f"""
UPDATE jobs SET lease_expires_at = lease_expires_at - started_at + :now, started_at = :now
WHERE queue = :queue AND {IS_RUNNING} AND lease_expires_at > :now AND {_FROM_AHEAD}"""
_PROMOTE = f"""
UPDATE jobs SET ready = 1 WHERE seq IN (
    SELECT seq FROM jobs WHERE queue = ? AND {IS_SCHEDULED} AND run_at <= ? LIMIT {PROMOTE_CHUNK})"""
_HEAD = f"SELECT seq, priority FROM jobs WHERE queue = ? AND {IS_READY} ORDER BY priority DESC, seq LIMIT ?"
_CLAIM = f"""
UPDATE jobs SET status = '{MOVES["claim", CLAIMABLE[0]]}', ready = 0, attempts = attempts + 1, lease_owner = ?,
       lease_token = lower(hex(randomblob(16))), lease_expires_at = ?, started_at = ?, progress = NULL,
       progress_note = NULL
WHERE seq IN ({{heads}}) AND status IN {quoted(sources("claim"))} AND unmet = 0 AND run_at <= ?
RETURNING {_COLUMNS}"""
_DEMOTE = "UPDATE jobs SET ready = 0 WHERE seq IN ({heads}) AND run_at > ?"

_PROLONG = f"""UPDATE jobs SET lease_expires_at = lease_expires_at + ? WHERE {IS_RUNNING} AND lease_expires_at > ?
               AND lease_owner IN (SELECT id FROM workers)"""
_EXTEND = f"UPDATE jobs SET lease_expires_at = :until WHERE {_HELD}"
_REPORT = f"UPDATE jobs SET progress = :progress, progress_note = :note WHERE {_HELD}"
_COMPLETE = f"""UPDATE jobs SET status = '{MOVES["complete", sources("complete")[0]]}', finished_at = :now,
                result = :result, {_END_LEASE} WHERE {_HELD}"""
_COMPLETE_ALL = f"""
UPDATE jobs SET status = '{MOVES["complete", sources("complete")[0]]}', finished_at = :now, result = done.result,
       {_END_LEASE}
FROM (SELECT value ->> 0 AS seq, value ->> 1 AS token, value ->> 2 AS result FROM json_each(:outcomes)) AS done
WHERE jobs.seq = done.seq AND jobs.lease_token = done.token AND {IS_RUNNING} AND lease_expires_at > :now
RETURNING seq"""
_RELEASE = f"""UPDATE jobs SET status = '{MOVES["release", sources("release")[0]]}', attempts = attempts - 1,
               started_at = NULL, ready = (run_at <= :now), {_END_LEASE} WHERE {_HELD}"""
_UNLOCK = f"""
UPDATE jobs SET unmet = unmet - done.edges,
       ready = (unmet = done.edges AND run_at <= ? AND status IN {quoted(CLAIMABLE)})
FROM (SELECT job, count(*) AS edges FROM dependencies
      WHERE depends_on IN (SELECT value FROM json_each(?)) GROUP BY job) AS done
WHERE seq = done.job"""

_FIND_PARENT = """SELECT seq, EXISTS (SELECT 1 FROM dependencies WHERE depends_on = seq)
                  FROM jobs WHERE id = ?"""
_HAS_DEPENDENTS = "SELECT 1 FROM dependencies WHERE depends_on IN (SELECT value FROM json_each(?)) LIMIT 1"

_ATTEMPT = f"SELECT attempts, max_attempts, lease_owner, started_at FROM jobs WHERE {_HELD}"
_FAIL = f"""UPDATE jobs SET status = :status, ready = (:ready AND run_at <= :now),
            run_at = coalesce(:run_at, run_at), last_error = :error, finished_at = :finished_at, {_END_LEASE}
            WHERE """
_FAIL_HELD = _FAIL + _HELD
_FAIL_EXPIRED = _FAIL + f"seq = :seq AND lease_token = :token AND {IS_RUNNING} AND lease_expires_at <= :now"
_ADD_FAILURE = """INSERT INTO failures(job, attempt, owner, started_at, ended_at, reason, error)
                  VALUES (:seq, :attempt, :owner, :started_at, :now, :reason, :error)"""
_EXPIRED = f"""SELECT {_COLUMNS} FROM jobs WHERE queue = ? AND {IS_RUNNING} AND lease_expires_at <= ?
               ORDER BY lease_expires_at LIMIT ?"""

CANCEL = f"""UPDATE jobs SET status = '{MOVES["cancel", sources("cancel")[0]]}', ready = 0, finished_at = ?,
              {_END_LEASE}
              WHERE {{key}} = ? AND status IN {quoted(sources("cancel"))}"""
_CANCEL = CANCEL.format(key="id")
_RENEW = f"""status = '{MOVES["retry", sources("retry")[0]]}', attempts = 0, run_at = min(run_at, ?),
             ready = (unmet = 0), started_at = NULL, finished_at = NULL, result = NULL, progress = NULL,
             progress_note = NULL"""
_RETRY = f"UPDATE jobs SET {_RENEW} WHERE id = ? AND status IN {quoted(DEAD)}"
_FAILED = f"""SELECT seq FROM jobs WHERE status = '{FAILED}' AND status IN {quoted(DEAD)} AND seq > :after
              AND (:type IS NULL OR type = :type) ORDER BY seq LIMIT {RETRY_CHUNK}"""
RETRY_FAILED = f"UPDATE jobs SET {_RENEW} WHERE seq = ? AND status = '{FAILED}'"


class Leases(Connection):
    """The part of the engine that moves jobs through their life; see `Store`."""

    # -- claiming ------------------------------------------------------------------------

    def has_due(self, *, now_ms: int, queues: Sequence[str] = (DEFAULT_QUEUE,)) -> bool:
        """Return whether `pull_back`, `recover_expired` or `promote` would find anything; cheaper than these."""
        with self.snapshot():
            return any(self.sqlite.execute(_ANY_DUE, {"queue": queue, "now": now_ms}).fetchall() == [(1,)]
                       for queue in queues)

    def pull_back(self, *, now_ms: int, queues: Sequence[str] = (DEFAULT_QUEUE,)) -> None:
        """Let leases that were granted by a clock that was ahead begin now: one whose holder has died would
        otherwise keep its job until that time comes.  Not for callers who make up their times."""
        with self.transaction():
            for queue in queues:
                at = {"queue": queue, "now": now_ms}
                if self.sqlite.execute(_LAST_FROM_AHEAD, at).fetchall():  # or else all that run would be looked at
                    self.sqlite.execute(_PULL_BACK, at)

    def promote(self, *, now_ms: int, queues: Sequence[str] = (DEFAULT_QUEUE,)) -> bool:
        """Mark scheduled jobs that have come due as ready, at most 10,000; return whether more may be left."""
        with self.transaction():
            promoted = [self.sqlite.execute(_PROMOTE, (queue, now_ms)).rowcount for queue in queues]
        return max(promoted, default=0) >= PROMOTE_CHUNK

    def claim(self, owner: str, *, now_ms: int, lease_ms: int, limit: int = 1,
              queues: Sequence[str] = (DEFAULT_QUEUE,)) -> list[Job]:
        """Take up to `limit` ready jobs: highest priority first, then the oldest.

        Call `promote` first, until it returns False.  Expired leases of others are not
        looked at: call `recover_expired` for them.

        Raises:
            InvalidJob: `lease_ms` or `limit` is not positive, or there are more than 250 queues.
        """
        if lease_ms <= 0 or limit <= 0:
            raise InvalidJob("a claim needs a positive lease and a positive limit")
        if len(queues) > MAX_QUEUES:
            raise InvalidJob(f"a claim may look into {MAX_QUEUES} queues at most, not {len(queues):,}")
        queues = tuple(dict.fromkeys(queues))  # named twice, one would fill the limit with the same jobs
        claim, demote = _claim_statements(len(queues))
        jobs: list[Job] = []
        width = limit

        def heads(size: int) -> list[object]:
            return [*(value for queue in queues for value in (queue, size)), size]

        with self.transaction():
            execute = self.sqlite.execute
            while True:
                left = limit - len(jobs)
                rows = execute(claim, (owner, now_ms + lease_ms, now_ms, *heads(left), now_ms)).fetchall()
                jobs += [Job(*row) for row in rows]
                # Fewer than asked for: all there was, unless some of the heads are not due (the clock
                # stepped back).  Those are put back, more each time, and the ones behind them tried.
                if len(rows) == left or not execute(demote, (*heads(width), now_ms)).rowcount:
                    break
                width = min(4 * width, PROMOTE_CHUNK)
        if len(jobs) > 1:  # RETURNING keeps no order
            jobs.sort(key=lambda job: (-job.priority, job.seq))
        return jobs

    # -- what the holder of a lease may do -----------------------------------------------

    def extend(self, job_id: str, token: str, *, now_ms: int, lease_ms: int) -> bool:
        """Let the lease run for `lease_ms` from now; return whether it was still held."""
        with self.transaction():
            return not self.extend_many([(self._seq(job_id), token)], now_ms=now_ms, lease_ms=lease_ms)

    def extend_many(self, leases: Iterable[tuple[int, str]], *, now_ms: int,
                    lease_ms: int) -> list[tuple[int, str]]:
        """Extend leases, each given as (seq, token); return those that are lost."""
        with self.transaction():
            return [(seq, token) for seq, token in leases if not self._update(
                _EXTEND, {"seq": seq, "token": token, "now": now_ms, "until": now_ms + lease_ms})]

    def prolong_for_workers(self, *, now_ms: int, by_ms: int) -> None:
        """Extend the leases that workers hold, as they could not while the write lock was held.

        Leases of others are left alone: they may live in another time (see `scheduler`).

        Args:
            now_ms: when the lock was taken; leases that had run out by then stay so.
        """
        with self.transaction():
            self.sqlite.execute(_PROLONG, (by_ms, now_ms))

    def report(self, job_id: str, token: str, progress: float, note: str | None, *, now_ms: int) -> bool:
        """Store how far a running job has come, 0 to 1; return whether the lease was still held."""
        with self.transaction():
            return self._update(_REPORT, {"seq": self._seq(job_id), "token": token, "now": now_ms,
                                          "progress": progress, "note": note})

    def complete(self, job_id: str, token: str, result: object = None, *, now_ms: int) -> bool:
        """Store a job's result and unlock its dependents; return whether the lease was still held.

        Raises:
            InvalidJob: the result is not JSON; the lease is left as it was.
        """
        text = None if result is None else encode_json(result, "result")
        with self.transaction():
            for seq, has_dependents in self.sqlite.execute(_FIND_PARENT, (job_id,)).fetchall():
                held = self._update(_COMPLETE, {"seq": seq, "token": token, "now": now_ms, "result": text})
                if held and has_dependents:
                    self.sqlite.execute(_UNLOCK, (now_ms, f"[{seq}]"))
                return held
            raise UnknownJobError(job_id)

    def complete_many(self, outcomes: Iterable[tuple[int, str, str | None]], *, now_ms: int) -> list[bool]:
        """Complete jobs, each given as (seq, token, result as JSON text); return which leases were still held."""
        outcomes = list(outcomes)
        with self.transaction():
            if 1 < len(outcomes) == len({seq for seq, _, _ in outcomes}):
                values = {"now": now_ms, "outcomes": json.dumps(outcomes)}
                done = [seq for (seq,) in self.sqlite.execute(_COMPLETE_ALL, values).fetchall()]
                kept = set(done)
                answers = [seq in kept for seq, _, _ in outcomes]
            else:  # a job twice: the first may be stale, and the second not
                answers = [self._update(_COMPLETE, {"seq": seq, "token": token, "now": now_ms, "result": result})
                           for seq, token, result in outcomes]
                done = [seq for (seq, _, _), held in zip(outcomes, answers, strict=True) if held]
            if done:
                parents = f"[{','.join(map(str, done))}]"
                if self.sqlite.execute(_HAS_DEPENDENTS, (parents,)).fetchall():  # a tenth of what _UNLOCK costs
                    self.sqlite.execute(_UNLOCK, (now_ms, parents))
        return answers

    def fail(self, job_id: str, token: str, error: object, *, now_ms: int, delay_ms: int | None = None,
             final: bool = False, reason: str = ERROR) -> str | None:
        """Record a failed attempt; return the status that follows, None if the lease was no longer held.

        Args:
            delay_ms: wait before the next attempt; None: the backoff.
            final: no further attempt, even if some are left.
        """
        with self.transaction():
            held = {"seq": self._seq(job_id), "token": token, "now": now_ms}
            for attempts, max_attempts, owner, started_at in self.sqlite.execute(_ATTEMPT, held).fetchall():
                status, wait_ms = after_failure(attempts, max_attempts, delay_ms=delay_ms, final=final)
                self._write_failure(_FAIL_HELD, held, status, wait_ms, {
                    "attempt": attempts, "owner": owner, "started_at": started_at, "reason": reason,
                    "error": clean_error(error)})
                return status
            return None

    def release(self, job_id: str, token: str, *, now_ms: int) -> bool:
        """Give a claimed job back, as if it had never been claimed; return whether the lease was still held."""
        with self.transaction():
            return self._update(_RELEASE, {"seq": self._seq(job_id), "token": token, "now": now_ms})

    # -- expiry --------------------------------------------------------------------------

    def recover_expired(self, *, now_ms: int, queues: Sequence[str] = (DEFAULT_QUEUE,),
                        limit: int = RECOVER_CHUNK) -> list[tuple[Job, str]]:
        """End leases that have run out, at most `limit`: claimable at once, or failed if no attempt is left.

        Returns:
            (job as it was, status that followed) for each.
        """
        recovered: list[tuple[Job, str]] = []
        with self.transaction():
            for queue in queues:
                expired = self.sqlite.execute(_EXPIRED, (queue, now_ms, limit - len(recovered))).fetchall()
                for job in [Job(*row) for row in expired]:
                    status, wait_ms = after_expiry(job.attempts, job.max_attempts)
                    held = {"seq": job.seq, "token": job.lease_token, "now": now_ms}
                    self._write_failure(_FAIL_EXPIRED, held, status, wait_ms, {
                        "attempt": job.attempts, "owner": job.lease_owner, "started_at": job.started_at,
                        "reason": LEASE_EXPIRED, "error": f"the lease of {job.lease_owner} ran out"})
                    recovered.append((job, status))
        return recovered

    def _write_failure(self, update: str, held: dict[str, Any], status: str, wait_ms: int,
                       failure: dict[str, Any]) -> None:
        again = status in CLAIMABLE
        if self._update(update, {**held, "status": status, "ready": again and wait_ms == 0,
                                 "run_at": held["now"] + wait_ms if again and wait_ms else None,
                                 "error": failure["error"],
                                 "finished_at": None if again else held["now"]}):
            self.sqlite.execute(_ADD_FAILURE, {**held, **failure})

    # -- the operator --------------------------------------------------------------------

    def cancel(self, job_id: str, *, now_ms: int) -> bool:
        """Cancel a job, also a running one, whose lease ends; return False if it was finished already.

        Raises:
            UnknownJobError: there is no such job.
        """
        with self.transaction():
            self._seq(job_id)
            return self.sqlite.execute(_CANCEL, (now_ms, job_id)).rowcount == 1

    def retry(self, job_id: str, *, now_ms: int) -> bool:
        """Give a failed or canceled job a new budget of attempts; return False if it is neither.

        Raises:
            UnknownJobError: there is no such job.
        """
        with self.transaction():
            self._seq(job_id)
            return self.sqlite.execute(_RETRY, (now_ms, job_id)).rowcount == 1

    def retry_failed(self, *, now_ms: int, type: str | None = None, after_seq: int = 0) -> tuple[int, int]:
        """Give failed jobs behind `after_seq` a new budget, at most 10,000, in order of `seq`.

        Returns:
            (how many, the last one's seq); 0 at the end.
        """
        with self.transaction():
            seqs = self.sqlite.execute(_FAILED, {"after": after_seq, "type": type}).fetchall()
            self.sqlite.executemany(RETRY_FAILED, [(now_ms, seq) for (seq,) in seqs])
        return len(seqs), seqs[-1][0] if seqs else after_seq

    # -- pieces --------------------------------------------------------------------------

    def _update(self, sql: str, parameters: dict[str, Any]) -> bool:
        return self.sqlite.execute(sql, parameters).rowcount == 1

    def _seq(self, job_id: str) -> int:
        for (seq,) in self.sqlite.execute("SELECT seq FROM jobs WHERE id = ?", (job_id,)).fetchall():
            return int(seq)
        raise UnknownJobError(job_id)


_statements: dict[int, tuple[str, str]] = {}


def _claim_statements(queues: int) -> tuple[str, str]:
    """Return the statements that claim the heads of so many queues, and that put back those not due."""
    if queues not in _statements:
        heads = f"SELECT seq FROM ({_HEAD})"
        if queues > 1:
            each = " UNION ALL ".join([f"SELECT * FROM ({_HEAD})"] * queues)
            heads = f"SELECT seq FROM ({each}) ORDER BY priority DESC, seq LIMIT ?"
        else:
            heads = f"SELECT seq FROM ({_HEAD}) LIMIT ?"
        _statements[queues] = _CLAIM.format(heads=heads), _DEMOTE.format(heads=heads)
    return _statements[queues]
