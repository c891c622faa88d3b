"""The child of `verify_pool`: reads (answer, gold) from a pipe and writes back (verdict, detail).

Runs as a script and imports nothing of rljax, so that it starts without jax. usage:
verify_worker.py FD LIMIT_S
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

MEMORY_BYTES = 4 << 30  # an answer that wants more fails here, not on the trainer


class OutOfTime(BaseException):
    """Raised by the timer; no Exception, which sympy and math-verify would catch."""


def _out_of_time(signum: int, frame: Any) -> None:
    raise OutOfTime


def check(answer: str, gold: str) -> str:
    """The verdict of math-verify, without any limit."""
    from math_verify import parse, verify

    expected = parse(gold, parsing_timeout=None, raise_on_error=True)  # pyright: ignore
    if not expected:
        raise ValueError(f"the reference answer {gold!r} cannot be parsed")
    found = parse(answer, parsing_timeout=None, raise_on_error=True)  # pyright: ignore
    if not found:
        return "unparsable"
    right = verify(expected, found, timeout_seconds=None, raise_on_error=True)
    return "correct" if right else "incorrect"


def limited_check(answer: str, gold: str, limit_s: float) -> tuple[str, str]:
    """(verdict, detail) of one check, stopped by a timer where the interpreter still runs."""
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            return check(answer, gold), ""
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        return "timeout", ""
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"[:500]


def main(fd: int, limit_s: float) -> None:
    """Serves checks until the other end closes."""
    pipe = Connection(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGALRM, _out_of_time)
    logging.disable(logging.WARNING)
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))
    try:
        check(r"\boxed{(x+1)^2}", r"\boxed{x^2+2x+1}")  # imports and warms up sympy
    except Exception:
        pipe.send(("failed", traceback.format_exc()))
        return
    pipe.send(("ready", ""))
    silent = os.open(os.devnull, os.O_WRONLY)
    while True:
        try:
            answer, gold = pipe.recv()
        except EOFError:
            return
        # A thread outside the interpreter ends this process should the parent be gone and the check
        # hang.
        faulthandler.dump_traceback_later(2 * limit_s + 10, exit=True, file=silent)
        reply = limited_check(answer, gold, limit_s)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(reply)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
