"""What `make run` shows: a few dozen varied jobs in a temporary file, worked off, and the table.

It uses the command line alone and prints each command before running it. It exits 1 if a job did not end as
it should. Not a test: nothing here is collected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from shlex import join
from typing import Any

TOP = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 30
DATABASE = ("--database", "jobs.db")

SINGLE = (
    ("--type", "print", "--payload", '{"message":"hello"}', "--priority", "10", "--max-attempts", "3",
     "--idempotency-key", "example-1"),
    # The same key again, as a cron line run twice: no second job, the same id.
    ("--type", "print", "--payload", '{"message":"hello"}', "--priority", "10", "--max-attempts", "3",
     "--idempotency-key", "example-1"),
    ("--type", "sleep", "--payload", '{"seconds":0.5}', "--id", "extract"),
    ("--type", "print", "--payload", '{"message":"extract is done: loading"}', "--id", "load",
     "--depends-on", "extract", "--priority", "100"),
    ("--type", "print", "--payload", '{"message":"load is done: reporting"}', "--id", "report",
     "--depends-on", "load"),
    ("--type", "print", "--payload", '{"message":"scheduled 2 s ago"}', "--id", "later", "--delay", "2"),
    ("--type", "fail", "--payload", '{"message":"no such host"}', "--id", "doomed", "--max-attempts", "2"),
)  # fmt: skip

# One atomic batch; `summary` depends on jobs of the same batch.
BATCH: tuple[dict[str, Any], ...] = (
    *({"type": "print", "payload": {"message": f"page {n}"}, "id": f"page-{n}", "priority": n % 3}
      for n in range(1, 25)),
    *({"type": "sleep", "payload": {"seconds": 0.05}} for _ in range(8)),
    {"type": "print", "payload": {"message": "all pages are printed"}, "id": "summary",
     "depends_on": [f"page-{n}" for n in range(1, 25)]},
)  # fmt: skip

# All of SINGLE but the repeated key, and the batch.
EXPECTED = {"completed": len(SINGLE) - 2 + len(BATCH), "failed": 1}


def jobqueue(directory: str, *args: str, given: str | None = None, capture: bool = False) -> str:
    """Show and run one command in `directory`; return its stdout if captured; raise if it does not exit 0."""
    words = join(["python", "-m", "jobqueue", *args])
    redirection = " < batch.jsonl" if given else " > jobs.jsonl" if capture else ""
    print(f"$ {words}{redirection}", flush=True)
    path = os.pathsep.join(filter(None, (str(TOP), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "jobqueue", *args],
        input=given or "",
        stdout=subprocess.PIPE if capture else None,
        encoding="utf-8",
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=2 * LIMIT_SECONDS,
    )
    return done.stdout or ""


def work_off(directory: str) -> list[dict[str, Any]]:
    """Drain again whenever a scheduled or retrying job falls due, until all have ended; return all jobs."""
    give_up = time.monotonic() + LIMIT_SECONDS
    while True:
        jobqueue(directory, "worker", *DATABASE, "--workers", "4", "--lease-seconds", "30", "--drain")
        listing = jobqueue(directory, "list", *DATABASE, "--json", capture=True)
        jobs = [json.loads(line) for line in listing.splitlines()]
        waiting = [job for job in jobs if job["status"] in ("pending", "retrying")]
        if not waiting or time.monotonic() > give_up:
            return jobs
        due = min(datetime.fromisoformat(job["run_at"]).timestamp() for job in waiting)
        pause = min(max(due - time.time(), 0.1), LIMIT_SECONDS)
        print(f"\n({len(waiting)} waiting; the next is due in {pause:.1f} s)", flush=True)
        time.sleep(pause)


def main() -> int:
    """Run the demonstration in a directory that is gone afterwards; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="jobqueue-demo-") as directory:
        jobqueue(directory, "init", *DATABASE)
        for args in SINGLE:
            jobqueue(directory, "enqueue", *DATABASE, *args)
        lines = "".join(json.dumps(job) + "\n" for job in BATCH)
        jobqueue(directory, "enqueue", *DATABASE, "--file", "-", given=lines)
        print()
        jobs = work_off(directory)
        print()
        jobqueue(directory, "list", *DATABASE)
    ended = dict(Counter(job["status"] for job in jobs))
    print("\n" + ", ".join(f"{number} {status}" for status, number in sorted(ended.items())), end="")
    if ended != EXPECTED:
        print(f": expected {EXPECTED}")
        return 1
    print(" (the one that was made to fail). Not one of these commands needed anything installed.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.SubprocessError as error:
        sys.exit(f"the demonstration stopped: {error}")
