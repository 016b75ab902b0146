"""Handlers for the end-to-end tests; they run in the children of a real worker.

What they did is told by a file `trace` in the worker's current directory, a line for each event: the event,
the id of the job, the attempt, the pid.  A gate is a file that a job waits for, so that a test decides when
it ends.  Nothing waits for ever, lest a failed test leave something behind.
"""

from __future__ import annotations

import os
import signal
import time

from jobqueue import JobContext, Reject, Retry, handler

TYPE_CHECKING = False  # each child of each worker imports this: nothing slow here
if TYPE_CHECKING:
    from typing import Any

LIMIT_SECONDS = 60


def note(event: str, context: JobContext) -> None:
    """Append one line to the trace; only SIGKILL can tear it, so each begins on a line of its own."""
    line = f"\n{event} {context.job_id} {context.attempt} {os.getpid()}\n"
    descriptor = os.open("trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def wait_for(gate: str) -> None:
    """Return once the file exists."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not os.path.exists(gate):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {gate}")
        time.sleep(0.002)


@handler("step")
def step(payload: Any, context: JobContext) -> Any:
    """Take as long as the payload says, or until its gate (with the attempt's number in it) is there."""
    note("start", context)
    payload = payload or {}
    if "gate" in payload:
        wait_for(payload["gate"].format(attempt=context.attempt))
    time.sleep(payload.get("seconds", 0))
    note("end", context)
    return payload.get("result")


@handler("echo")
def echo(payload: Any, context: JobContext) -> Any:
    return payload


@handler("about")
def about(payload: Any, context: JobContext) -> dict[str, Any]:
    names = ("job_id", "type", "attempt", "max_attempts", "trace", "stopping")
    return {name: getattr(context, name) for name in names}


@handler("async")
async def in_a_loop(payload: Any, context: JobContext) -> Any:
    import asyncio

    await asyncio.sleep(0)
    if payload == "raise":
        raise LookupError("raised in the loop")
    return {"awaited": payload}


@handler("async-sleep")
async def sleep_in_a_loop(payload: Any, context: JobContext) -> None:
    import asyncio

    await asyncio.sleep(payload)


@handler("fail-until")
def fail_until(payload: Any, context: JobContext) -> None:
    """Fail all attempts up to that number."""
    if context.attempt <= payload:
        raise RuntimeError(f"attempt {context.attempt}")


@handler("retry")
def ask_for_retry(payload: Any, context: JobContext) -> None:
    """Ask for a retry after so many seconds, at the first attempt."""
    if context.attempt == 1:
        raise Retry(after=payload, reason="not yet")


@handler("reject")
def reject(payload: Any, context: JobContext) -> None:
    raise Reject("never")


@handler("not-json")
def not_json(payload: Any, context: JobContext) -> object:
    return {"answer": object()}


@handler("raise")
def raise_text(payload: Any, context: JobContext) -> None:
    raise ValueError(payload)


@handler("exit")
def leave(payload: Any, context: JobContext) -> None:
    raise SystemExit(payload)


@handler("flaky")
def flaky(payload: Any, context: JobContext) -> str:
    """Fail until the file is there."""
    if not os.path.exists(payload):
        raise OSError(f"{payload} is not there yet")
    return "at last"


@handler("progress")
def progress(payload: Any, context: JobContext) -> None:
    """Report a progress that has to be seen before the gate opens."""
    context.progress(payload["fraction"], payload["note"])
    wait_for(payload["gate"])


@handler("kill-itself")
def kill_itself(payload: Any, context: JobContext) -> None:
    note("start", context)
    os.kill(os.getpid(), getattr(signal, payload))
    signal.pause()


@handler("exit-at-once")
def exit_at_once(payload: Any, context: JobContext) -> None:
    os._exit(payload)


@handler("hold-gil")
def hold_gil(payload: Any, context: JobContext) -> None:
    """Never return, in one C call that lets no other thread and no signal handler run."""
    note("start", context)
    sum(range(10**15))


@handler("stubborn")
def stubborn(payload: Any, context: JobContext) -> None:
    """Ignore whatever asks it to end."""
    note("start", context)
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        try:
            time.sleep(LIMIT_SECONDS)
        except BaseException:
            pass


@handler("until-stopped")
def until_stopped(payload: Any, context: JobContext) -> None:
    """Go on until asked to stop, then clean up."""
    note("start", context)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not context.stopping and time.monotonic() < deadline:
        time.sleep(0.002)
    note("stopped", context)


@handler("cleaning-up")
def cleaning_up(payload: Any, context: JobContext) -> None:
    """Do not look, but clean up when interrupted."""
    note("start", context)
    try:
        time.sleep(LIMIT_SECONDS)
    finally:
        note("cleaned", context)


@handler("size")
def size(payload: Any, context: JobContext) -> int:
    note("start", context)
    return len(payload)


@handler("stop-supervisor")
def stop_supervisor(payload: Any, context: JobContext) -> None:
    """Stop the supervisor by SIGSTOP unless a job did so before; that one then waits for the gate."""
    note("start", context)
    try:
        os.close(os.open(payload["once"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getppid(), signal.SIGSTOP)
    note("stopped-it", context)
    wait_for(payload["gate"])


@handler("interrupt-supervisor")
def interrupt_supervisor(payload: Any, context: JobContext) -> None:
    """Send SIGINT to the supervisor unless a job did so before; that one gives it a moment to react."""
    note("start", context)
    try:
        os.close(os.open(payload, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    note("interrupts", context)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.008)  # less than what a worker calls slow
