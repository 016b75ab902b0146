"""Handlers for the tests of the pool: well-behaved ones, and one for each way to misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from jobqueue.handlers import JobContext, Reject, Retry, handler


@handler("echo")
def echo(payload: Any, context: JobContext) -> Any:
    return payload


@handler("length")
def length(payload: Any, context: JobContext) -> int:
    return len(payload)


@handler("about")
def about(payload: Any, context: JobContext) -> dict[str, Any]:
    names = ("job_id", "type", "attempt", "max_attempts", "trace", "stopping")
    return {"pid": os.getpid(), **{name: getattr(context, name) for name in names}}


@handler("async")
async def in_a_loop(payload: Any, context: JobContext) -> Any:
    await asyncio.sleep(0)
    return payload


@handler("progress")
def progress(payload: Any, context: JobContext) -> None:
    for fraction in payload:
        context.progress(fraction, f"at {fraction}")


@handler("not-json")
def not_json(payload: Any, context: JobContext) -> object:
    return object()


@handler("raise")
def raise_it(payload: Any, context: JobContext) -> None:
    raise {"exit": SystemExit(payload), "interrupt": KeyboardInterrupt(), "memory": MemoryError(),
           "surrogate": ValueError("bad \ud800 text"), "retry": Retry(1.5, "not yet"), "retry-usual": Retry(),
           "reject": Reject("never")}[payload]  # fmt: skip


@handler("recurse")
def recurse(payload: Any, context: JobContext) -> None:
    recurse(payload, context)


@handler("kill-me")
def kill_me(payload: Any, context: JobContext) -> None:
    os.kill(os.getpid(), getattr(signal, payload))
    signal.pause()


@handler("exit-me")
def exit_me(payload: Any, context: JobContext) -> None:
    os._exit(payload)


@handler("hold-gil")
def hold_gil(payload: Any, context: JobContext) -> None:
    """Never return, in one C call that lets no other thread and no signal handler run."""
    sum(range(10**15))


@handler("stubborn")
def stubborn(payload: Any, context: JobContext) -> None:
    """Ignore whatever asks it to end."""
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass


@handler("wait-for-stop")
def wait_for_stop(payload: Any, context: JobContext) -> None:
    """Return once asked to stop."""
    context.progress(0.5)
    while not context.stopping:
        time.sleep(0.001)


@handler("wait-for-file")
def wait_for_file(payload: Any, context: JobContext) -> None:
    context.progress(0.5)
    while not Path(payload).exists():
        time.sleep(0.001)


@handler("return-none-on-term")
def swallow(payload: Any, context: JobContext) -> str:
    """Swallow what SIGTERM raises, and claim success."""
    context.progress(0.5)
    try:
        time.sleep(600)
    except BaseException:
        pass
    return "success"


@handler("clean-up")
def clean_up(payload: Any, context: JobContext) -> None:
    """Take a while to clean up when stopped, and leave a file when that was not disturbed."""
    try:
        context.progress(0.5)
        time.sleep(600)
    except BaseException:
        time.sleep(0.3)
        Path(payload).touch()
        raise


@handler("fork")
def fork(payload: Any, context: JobContext) -> None:
    """Leave a process behind that keeps all descriptors open, its pid in a file, and die."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    Path(payload).write_text(str(pid))
    os._exit(3)


@handler("fork-and-return")
def fork_and_return(payload: Any, context: JobContext) -> int:
    """Return in two processes."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return 1


@handler("fork-and-terminate")
def fork_and_terminate(payload: Any, context: JobContext) -> int:
    """Return how a forked process ends that gets SIGTERM."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b"up")
        while True:
            signal.pause()
    os.read(reading, 2)
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@handler("garbage")
def garbage(payload: Any, context: JobContext) -> None:
    """Write into the pipes that are not the handler's, but for multiprocessing's own."""
    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode) and fd != resource_tracker.getfd():
                os.write(fd, bytes.fromhex(payload))
        except OSError:
            pass
    while True:
        signal.pause()


@handler("close-all")
def close_all(payload: Any, context: JobContext) -> None:
    """Close every descriptor, as a program that makes itself a daemon does, and go on."""
    os.closerange(3, 256)
    while True:
        signal.pause()
