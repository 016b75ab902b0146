"""What `mutants` breaks: for every check that a promise rests on, the words of it, and what is put in their place.

The words are short and stand in one expression, so that other changes of the module leave them alone. Each mutation
names the tests that must notice, quickest first, and the promise (see the README's guarantees) that it breaks.

Not here, as nothing would change: checks that stand twice on purpose. The claim asks for the status and for `unmet`
although a CHECK of the table says that `ready = 1` implies both; every move of a lease's holder asks for the status
although only a running job has a token; recovery asks for the end of a lease when it looks and when it writes, in
one transaction.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One fault to put in.

    Attributes:
        promise: the number of the promise that it breaks.
        file: below `jobqueue/`.
        old, new: what is replaced, and by what; `old` must be there `times` times.
        tests: modules, classes or tests below `tests`, run until the first failure.
    """

    promise: int
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    times: int = 1


_M = Mutation
_CLAIMS = ("test_db", "test_claims", "test_queue", "test_conformance")
_EDGES = ("test_dependencies", "test_conformance")
_RULES = ("test_jobs",)
_CHECKPOINTS = "test_checkpoints.CheckpointTest"
_ONCE = "test_signals.OnceTest"
_FILES = ("test_files.RefuseTest", "test_files.CreateTest")

_TOKENS = (
    _M(4, "held-token", "leases.py", '_HELD = f"seq = :seq AND lease_token = :token AND',
       '_HELD = f"seq = :seq AND', _CLAIMS),
    _M(4, "held-expiry", "leases.py", '{IS_RUNNING} AND lease_expires_at > :now"', '{IS_RUNNING}"', _CLAIMS),
    _M(4, "held-at-its-last-moment", "leases.py", '{IS_RUNNING} AND lease_expires_at > :now"',
       '{IS_RUNNING} AND lease_expires_at >= :now"', _CLAIMS),
    _M(4, "extend-any-lease", "leases.py", "lease_expires_at = :until WHERE {_HELD}",
       "lease_expires_at = :until WHERE seq = :seq AND lease_token IS NOT NULL", _CLAIMS),
    _M(4, "report-any-lease", "leases.py", "progress_note = :note WHERE {_HELD}",
       "progress_note = :note WHERE seq = :seq", _CLAIMS),
    _M(4, "complete-any-lease", "leases.py", "result = :result, {_END_LEASE} WHERE {_HELD}",
       "result = :result, {_END_LEASE} WHERE seq = :seq", _CLAIMS),
    _M(4, "complete-all-of-any-lease", "leases.py", "AND jobs.lease_token = done.token AND {IS_RUNNING}",
       "AND {IS_RUNNING}", ("test_db",)),
    _M(4, "complete-all-after-the-lease", "leases.py", "{IS_RUNNING} AND lease_expires_at > :now\nRETURNING",
       "{IS_RUNNING}\nRETURNING", ("test_db",)),
    _M(4, "release-any-lease", "leases.py", "ready = (run_at <= :now), {_END_LEASE} WHERE {_HELD}",
       "ready = (run_at <= :now), {_END_LEASE} WHERE seq = :seq AND {IS_RUNNING}", _CLAIMS),
    _M(4, "fail-any-lease", "leases.py", "started_at FROM jobs WHERE {_HELD}",
       "started_at FROM jobs WHERE seq = :seq", _CLAIMS),
    _M(3, "token-constant", "leases.py", "lower(hex(randomblob(16)))", "'0123456789abcdef'", _CLAIMS),
    _M(3, "token-of-the-memory-engine", "memory/store.py", "str(next(self._tokens))", '"1"',
       ("test_memory.TokenTest", "test_conformance")),
    _M(4, "memory-held-token", "memory/store.py", "entry.lease_token != token or", "",
       ("test_memory.TokenTest", "test_conformance")),
    _M(4, "memory-held-expiry", "memory/store.py", "or entry.lease_expires_at <= now:",
       "or entry.lease_expires_at < now:", ("test_conformance", "test_memory")),
    _M(4, "stale-result-counts-as-done", "turn.py", "COMPLETED if held else None", "COMPLETED",
       ("test_survival.StoppedTest.test_its_late_result_is_refused_and_logged",)),
)

_EXPIRY = (
    _M(8, "expired-too-late", "leases.py", "{IS_RUNNING} AND lease_expires_at <= ?\n",
       "{IS_RUNNING} AND lease_expires_at < ?\n", _CLAIMS),
    _M(3, "expired-too-early", "leases.py", "{IS_RUNNING} AND lease_expires_at <= ?\n",
       "{IS_RUNNING} AND lease_expires_at <= ? + 1\n", _CLAIMS),
    _M(8, "expired-with-backoff", "lifecycle.py", "max_attempts, delay_ms=0)", "max_attempts)",
       ("test_lifecycle", "test_claims")),
    _M(8, "claim-without-recovery", "queue.py",
       "recovered = self._store.recover_expired(now_ms=now_ms, queues=queues)\n", "recovered: Jobs = []\n",
       ("test_queue",)),
    _M(8, "worker-without-recovery", "turn.py",
       "turn.expired = store.recover_expired(now_ms=turn.now, queues=queues)", "turn.expired = []",
       ("test_worker.DayTest",)),
    _M(8, "expired-found-too-late", "leases.py", "{IS_RUNNING} AND lease_expires_at <= :now)",
       "{IS_RUNNING} AND lease_expires_at < :now)", ("test_queue", "test_claims")),
    _M(6, "due-found-too-late", "leases.py", "{IS_SCHEDULED} AND run_at <= :now)",
       "{IS_SCHEDULED} AND run_at < :now)", ("test_queue", "test_claims")),
    _M(8, "prolong-any-owner", "leases.py", "AND lease_owner IN (SELECT id FROM workers)", "",
       ("test_claims", "test_batch", "test_queue")),
    _M(4, "prolong-the-dead", "leases.py", "WHERE {IS_RUNNING} AND lease_expires_at > ?",
       "WHERE {IS_RUNNING} AND ? IS NOT NULL", ("test_claims", "test_batch", "test_queue")),
    _M(8, "no-heartbeat", "worker.py", "return bool(self._held) and now - self._extended_at",
       "return False and now - self._extended_at", ("test_together", "test_survival")),
    _M(8, "a-dead-child-keeps-its-job", "pool.py", "for job in child.handed.values():  # at most one",
       "for job in ():  # at most one",
       ("test_pool.DeathTest.test_the_job_of_a_child_that_dies_fails_with_the_reason",)),
    _M(3, "child-starts-after-its-deadline", "child.py", "if started >= deadline:", "if started < 0:",
       ("test_pool.RunningTest.test_nothing_starts_past_its_deadline",)),
    _M(3, "lost-lease-stops-nobody", "worker.py",
       'self._pool.stop_job(job, "the lease is lost", grace=1.0)', "pass",
       ("test_worker.ChildTest.test_a_canceled_job_is_told_to_stop_and_the_worker_goes_on",)),
)

_CLAIMING = (
    _M(11, "claim-before-run-at", "leases.py", "AND unmet = 0 AND run_at <= ?\nRETURNING",
       "AND unmet = 0 AND ? IS NOT NULL\nRETURNING", _CLAIMS),
    _M(11, "claim-early-by-1-ms", "leases.py", "AND unmet = 0 AND run_at <= ?\nRETURNING",
       "AND unmet = 0 AND run_at <= ? + 1\nRETURNING", ("test_claims", "test_conformance")),
    _M(6, "claim-late-by-1-ms", "leases.py", "AND unmet = 0 AND run_at <= ?\nRETURNING",
       "AND unmet = 0 AND run_at < ?\nRETURNING", _CLAIMS),
    _M(7, "claim-does-not-count", "leases.py", "attempts = attempts + 1", "attempts = max(attempts, 1)", _CLAIMS),
    _M(11, "claim-lowest-first", "leases.py", "AND {IS_READY} ORDER BY priority DESC, seq",
       "AND {IS_READY} ORDER BY priority, seq", _CLAIMS),
    _M(11, "claim-newest-first", "leases.py", "AND {IS_READY} ORDER BY priority DESC, seq",
       "AND {IS_READY} ORDER BY priority DESC, seq DESC", _CLAIMS),
    _M(11, "claim-order-of-many-queues", "leases.py", "({each}) ORDER BY priority DESC, seq",
       "({each}) ORDER BY seq", _CLAIMS),
    _M(11, "claim-unsorted", "leases.py", "jobs.sort(key=lambda job: (-job.priority, job.seq))",
       "jobs.sort(key=lambda job: job.seq)", _CLAIMS),
    _M(11, "claim-from-any-queue", "leases.py", "WHERE queue = ? AND {IS_READY}", "WHERE ? <> '' AND {IS_READY}",
       _CLAIMS),
    _M(11, "claim-queue-named-twice", "leases.py", "queues = tuple(dict.fromkeys(queues))",
       "queues = tuple(queues)", _CLAIMS),
    _M(8, "recover-from-any-queue", "leases.py", "WHERE queue = ? AND {IS_RUNNING} AND lease_expires_at <= ?\n",
       "WHERE ? <> '' AND {IS_RUNNING} AND lease_expires_at <= ?\n", _CLAIMS),
    _M(12, "demote-nothing", "leases.py", "AND run_at > ?\"", "AND run_at > ? + (1 << 60)\"", _CLAIMS),
    _M(6, "promote-late-by-1-ms", "leases.py", "AND run_at <= ? LIMIT", "AND run_at < ? LIMIT", _CLAIMS),
    _M(11, "promote-too-early", "leases.py", "AND run_at <= ? LIMIT", "AND run_at <= ? + 60000 LIMIT",
       ("test_claims", "test_catalogue", "test_scheduler", "test_conformance")),
    _M(11, "promote-any-queue", "leases.py", "WHERE queue = ? AND {IS_SCHEDULED}",
       "WHERE ? <> '' AND {IS_SCHEDULED}", ("test_claims", "test_plans")),
    _M(9, "promote-what-waits", "schema.py", "ready = 0 AND unmet = 0 AND status IN", "ready = 0 AND status IN",
       _EDGES),
    _M(11, "claim-with-more-to-promote", "queue.py", "self._store.promote(now_ms=now_ms, queues=queues) or",
       "self._store.promote(now_ms=now_ms, queues=queues) and False or", ("test_queue", "test_claims")),
    _M(11, "memory-order", "memory/store.py", "lane.ready.put(-entry.priority, entry.seq)",
       "lane.ready.put(entry.priority, entry.seq)", ("test_conformance",)),
    _M(3, "begin-deferred", "connection.py", '"BEGIN IMMEDIATE", "BEGIN"', '"BEGIN DEFERRED", "BEGIN"',
       ("test_connection", "test_races")),
    _M(11, "scheduler-reaches-other-queues", "scheduler.py", "job is not None and job.queue == self.queue",
       "job is not None", ("test_scheduler.LookTest",)),
    _M(11, "asyncio-reaches-other-queues", "aio/moves.py", "job is not None and job.queue == self.queue",
       "job is not None", ("test_aio", "test_aio_lease", "test_aio_trouble")),
)

_ATTEMPTS = (
    _M(7, "one-attempt-too-many", "lifecycle.py", "attempts >= max_attempts", "attempts > max_attempts",
       ("test_lifecycle",)),
    _M(7, "attempts-unlimited-in-the-file", "schema.py", "CHECK (attempts BETWEEN 0 AND max_attempts)",
       "CHECK (attempts >= 0)", ("test_db",)),
    _M(7, "rejected-and-tried-again", "lifecycle.py", "if final or attempts >= max_attempts:",
       "if attempts >= max_attempts:", ("test_lifecycle",)),
    _M(6, "backoff-grows-at-once", "lifecycle.py", "min(attempt - 1, 30)", "min(attempt, 30)", ("test_lifecycle",)),
    _M(6, "backoff-without-cap", "lifecycle.py", "BACKOFF_CAP_MS = 60_000", "BACKOFF_CAP_MS = 600_000",
       ("test_lifecycle",)),
    _M(7, "release-keeps-the-attempt", "leases.py", "attempts = attempts - 1", "attempts = attempts", _CLAIMS),
    _M(6, "fail-without-wait", "leases.py", '"run_at": held["now"] + wait_ms if again',
       '"run_at": held["now"] if again', _CLAIMS),
    _M(7, "shutdown-costs-an-attempt", "turn.py", "if outcome.kind in (ERROR, RETRY, REJECT):",
       "if outcome.kind != DONE:", (f"{_ONCE}.test_after_the_grace_the_job_is_stopped_and_given_back",)),
    _M(5, "cancel-what-is-finished", "leases.py", 'AND status IN {quoted(sources("cancel"))}', "", _CLAIMS),
    _M(5, "retry-anything", "leases.py", "WHERE id = ? AND status IN {quoted(DEAD)}", "WHERE id = ?", _CLAIMS),
    _M(7, "retry-keeps-attempts", "leases.py", "attempts = 0, run_at = min(", "attempts = attempts, run_at = min(",
       _CLAIMS),
    _M(9, "retry-makes-ready", "leases.py", "ready = (unmet = 0), started_at", "ready = 1, started_at", _EDGES),
    _M(5, "retry-failed-takes-canceled", "leases.py",
       "WHERE status = '{FAILED}' AND status IN {quoted(DEAD)} AND seq > :after",
       "WHERE status IN {quoted(DEAD)} AND seq > :after", ("test_catalogue",)),
    _M(6, "a-trouble-loses-outcomes", "worker.py", "            self._note_trouble(error, begun)\n",
       "            self._outcomes.clear()\n            self._note_trouble(error, begun)\n",
       (f"{_ONCE}.test_while_somebody_else_has_the_file_locked_nothing_is_lost", "test_together")),
    _M(6, "settled-before-it-is-printed", "worker.py", "if event.text is None:", "if event.text is None or True:",
       ("test_worker.OutputTest.test_a_worker_that_cannot_print_gives_the_job_back_and_ends_with_1",)),
    _M(6, "no-time-limit", "pool.py", "if child.stop is None and not child.dismissed:", "if False:",
       ("test_pool.StopTest.test_a_timeout_ends_the_handler",)),
    _M(6, "no-sigkill", "pool.py", "        else:\n            child.process.kill()\n", "        else:\n",
       ("test_pool.StopTest.test_a_timeout_that_is_ignored_ends_the_child",)),
    _M(8, "children-outlive-their-supervisor", "child.py", "            _watch_supervisor(silent.fd)\n", "",
       ("test_pool.SupervisorTest.test_children_end_when_the_supervisor_is_killed",
        "test_survival.KilledTest")),
)

_DEPENDENCIES = (
    _M(9, "unlock-once-per-batch", "leases.py", "count(*) AS edges", "1 AS edges", _EDGES),
    _M(9, "unlock-nothing", "leases.py", "unmet = unmet - done.edges", "unmet = unmet", _EDGES),
    _M(9, "unlock-all", "leases.py", "unmet = unmet - done.edges,\n       ready = (unmet = done.edges AND",
       "unmet = 0,\n       ready = (", _EDGES),
    _M(9, "unlock-by-a-stale-result", "leases.py", "kept = set(done)",
       "kept, done = set(done), [seq for seq, _, _ in outcomes]", ("test_dependencies",)),
    _M(9, "unlock-by-one-stale-result-alone", "leases.py", "strict=True) if held]", "strict=True)]",
       ("test_dependencies",)),
    _M(9, "unlock-by-a-single-stale-result", "leases.py", "if held and has_dependents:", "if has_dependents:",
       ("test_dependencies", "test_claims", "test_conformance")),
    _M(9, "unmet-not-counted", "intake.py", "unmet = sum(status != COMPLETED for", "unmet = sum(False for", _EDGES),
    _M(9, "unmet-not-counted-in-a-batch", "batch.py", "sum(parent.status <> '{COMPLETED}')",
       "sum(parent.status = '{COMPLETED}')", ("test_batch", "test_dependencies")),
    _M(9, "completed-parents-counted", "intake.py", "unmet = sum(status != COMPLETED for", "unmet = sum(True for",
       _EDGES),
    _M(9, "unknown-parent", "intake.py", "        raise InvalidJob(unknown(name))", "        return 0, PENDING",
       _EDGES),
    _M(9, "unknown-parent-in-a-batch", "batch.py", "WHERE parent IS NULL AND twin IS NULL",
       "WHERE FALSE AND twin IS NULL", ("test_batch", "test_dependencies")),
    _M(9, "ring-in-a-batch", "batch.py", "if self._has_edges and self._query(_FORWARD_EDGE):", "if False:",
       ("test_batch", "test_dependencies")),
    _M(9, "depends-on-itself", "jobs.py", "    if id in unique:", "    if False:", ("test_jobs",)),
    _M(9, "blocked-at-one-level", "catalogue.py", "    SELECT job FROM blocked JOIN dependencies ON depends_on",
       "    SELECT job FROM blocked JOIN dependencies ON 0 AND depends_on", ("test_dependencies",)),
    _M(9, "memory-unmet", "memory/store.py", "dependent.unmet -= 1", "dependent.unmet = 0",
       ("test_conformance", "test_memory")),
)

_STORING = (
    _M(10, "key-not-looked-up", "intake.py", "if job.idempotency_key is not None:", "if False:",
       ("test_db", "test_queue")),
    _M(10, "key-not-unique", "schema.py", "CREATE UNIQUE INDEX jobs_idempotency_key",
       "CREATE INDEX jobs_idempotency_key", ("test_db",)),
    _M(10, "key-not-looked-up-in-a-batch", "batch.py", "self._query(_FIND_TWINS)", "pass", ("test_batch",)),
    _M(10, "key-twice-in-a-batch", "batch.py", "                self._query(_MARK_REPEATED_KEYS)\n", "",
       ("test_batch",)),
    _M(2, "batch-unchecked-ids", "batch.py", "HAVING count(DISTINCT coalesce(first, n)) > 1",
       "HAVING count(DISTINCT coalesce(first, n)) > 9", ("test_batch",)),
    _M(2, "numbers-run-into-ids", "intake.py", "while execute(_BY_ID, (str(seq),)).fetchall():", "while False:",
       ("test_batch.NumbersTest",)),
    _M(2, "numbers-run-into-ids-in-a-batch", "batch.py", "            self._skip_taken_numbers()\n", "",
       ("test_batch",)),
    _M(2, "commit-what-failed", "connection.py", 'if error is None:\n                connection.execute("COMMIT")',
       'if True:\n                connection.execute("COMMIT")', ("test_connection", "test_batch")),
    _M(1, "answer-before-the-commit", "shared_commit.py",
       "answers.append((request, self._store.add(request.job, now_ms=now)))",
       "request.answer = self._store.add(request.job, now_ms=now)", ("test_queue_threads",)),
    _M(1, "synchronous-normal", "connection.py", "synchronous = FULL", "synchronous = NORMAL",
       ("test_files.CreateTest.test_a_new_file_is_private_and_marked_as_ours",)),
    _M(15, "autocheckpoint", "connection.py", '"wal_autocheckpoint = 0"', '"wal_autocheckpoint = 1000"',
       (f"{_CHECKPOINTS}.test_by_itself_no_connection_checkpoints",)),
    _M(15, "checkpoint-without-guard", "connection.py", '            self._guard.execute("BEGIN IMMEDIATE")',
       '            self._guard.execute("BEGIN")', ("test_checkpoints",)),
    _M(15, "checkpoint-never", "connection.py", "self.wal_bytes() < least:", "self.wal_bytes() < 1000 * least:",
       (f"{_CHECKPOINTS}.test_the_wal_stays_bounded_over_many_commits",)),
    _M(15, "wal-never-shrinks", "connection.py", "f\"journal_size_limit = {WAL_KEPT_BYTES}\"",
       "\"journal_size_limit = -1\"", ("test_files.CreateTest", "test_checkpoints")),
    _M(1, "fork-keeps-connections", "forks.py", "        connection.disown(held)", "        pass", ("test_forks",)),
)

_FOREIGN = (
    _M(14, "foreign-application-id", "schema.py", "if application_id != APPLICATION_ID:", "if False:", _FILES),
    _M(14, "newer-version", "schema.py", "if version > VERSION:", "if False:", _FILES),
    _M(14, "missing-tables", "schema.py", "if missing or version < 1:", "if version < 1:", _FILES),
    _M(14, "foreign-tables-look-blank", "schema.py",
       '(0, 0)] and connection.execute("SELECT count(*) FROM sqlite_master").fetchall() == [(0,)]', "(0, 0)]",
       _FILES),
    _M(14, "foreign-header-looks-blank", "schema.py", "return header == [(0, 0)] and connection",
       "return connection", _FILES),
    _M(14, "first-look-may-write", "connection.py", 'connection = self._connect("ro")',
       'connection = self._connect("rw")',
       ("test_files.RefuseTest.test_the_wal_and_the_hot_journal_of_a_program_that_crashed",)),
    _M(14, "no-first-sight", "connection.py", "            self._refuse_at_first_sight()", "            pass",
       _FILES),
    _M(14, "readable-by-all", "place.py", "flags, 0o600))", "flags, 0o644))", _FILES),
    _M(14, "network-mounts", "place.py", "if (kind in _NETWORK_FILE_SYSTEMS or", "if (False and", _FILES),
    _M(14, "replaced-file-unnoticed", "connection.py",
       'return place.identity(self.path) != self._identity or wal != self._wal_identity',
       "return wal != self._wal_identity and False", ("test_files.PathTest",)),
    _M(14, "uri-not-encoded", "place.py", 'else f"%{byte:02X}"', "else chr(byte)", ("test_files.PathTest",)),
)

_INPUT = (
    _M(13, "names-too-long", "jobs.py", "MAX_NAME_LENGTH = 255", "MAX_NAME_LENGTH = 256", _RULES),
    _M(13, "names-with-controls", "jobs.py", "if _FORBIDDEN.search(value):", "if False:", _RULES),
    _M(13, "json-too-large", "jobs.py", "MAX_JSON_BYTES = 1024 * 1024", "MAX_JSON_BYTES = 1024 * 1024 + 1",
       _RULES),
    _M(13, "json-too-deep", "jobs.py", "MAX_JSON_DEPTH = 64", "MAX_JSON_DEPTH = 65", _RULES),
    _M(13, "json-with-nan", "jobs.py", "False, False, False)", "False, False, True)", _RULES),
    _M(13, "json-text-with-nan", "jobs.py", "_decode = json.JSONDecoder(parse_constant=_reject_constant)",
       "_decode = json.JSONDecoder()", _RULES),
    _M(13, "json-with-surrogates", "jobs.py", "if text.isascii() else len(text.encode())",
       'if text.isascii() else len(text.encode("utf-8", "surrogatepass"))', _RULES),
    _M(13, "json-with-endless-integers", "jobs.py", "if _LONG_INTEGER.search(text) and", "if False and", _RULES),
    _M(13, "integers-unbounded", "jobs.py", "if not minimum <= value <= maximum:", "if False:", _RULES),
    _M(13, "booleans-are-integers", "jobs.py", "if not isinstance(value, int) or isinstance(value, bool):",
       "if not isinstance(value, int):", _RULES),
    _M(13, "too-many-dependencies", "jobs.py", "if len(unique) > MAX_DEPENDENCIES:", "if False:", _RULES),
    _M(13, "run-at-and-delay", "jobs.py", "if run_at is not None and delay is not None:", "if False:", _RULES),
    _M(13, "times-without-offset", "jobs.py", "if value.utcoffset() is None:", "if False:", _RULES),
    _M(13, "errors-with-surrogates", "jobs.py", '.encode("utf-8", "backslashreplace").decode()', "", _RULES),
    _M(13, "errors-without-end", "jobs.py", "return shown if len(shown) <= MAX_ERROR_LENGTH else",
       "return shown if True else", _RULES),
    _M(13, "raw-text-on-a-terminal", "text.py", "else UNSAFE.sub(_escaped, text)", "else text",
       ("test_render", "test_cli.UsageTest")),
    _M(13, "raw-text-in-json", "text.py", "else UNSAFE.sub(_escaped_in_json, line)", "else line", ("test_render",)),
)

MUTATIONS = (*_TOKENS, *_EXPIRY, *_CLAIMING, *_ATTEMPTS, *_DEPENDENCIES, *_STORING, *_FOREIGN, *_INPUT)
