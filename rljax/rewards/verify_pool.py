"""A small pool of math-verify processes in which a check that hangs or dies costs that check alone.

math-verify refuses to run in threads, and `9^{9^{9^{9}}}` holds the interpreter lock, so that no
timer inside the process can end it. Each worker is therefore a process of its own, watched from
here: it stops itself by a timer where Python still runs, and is killed and replaced where not.
concurrent.futures cannot kill one worker, and multiprocessing would run the user's script again in
every child, hence plain subprocesses.
"""

from __future__ import annotations

import enum
import importlib.util
import logging
import math
import multiprocessing
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from rljax.rewards import base

log = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # import of sympy and math-verify on a loaded machine
GRACE_S = 0.25  # between the worker's own timer and the kill
# -P: or the script's folder would come first on its path, and `import math` would find our math.py
SCRIPT = ["-P", str(Path(__file__).with_name("verify_worker.py"))]


class Verdict(enum.Enum):
    """What became of one check."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    UNPARSABLE = "unparsable"  # no answer, or none that the parser understands
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # the verifier failed: nothing is known about the answer


class _Worker:
    """One process: starting, idle (ready, no job) or busy with the pair of index `job`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.start()

    def start(self) -> None:
        self.conn, theirs = multiprocessing.Pipe()
        self.process = subprocess.Popen(
            [sys.executable, *SCRIPT, str(theirs.fileno()), str(self.limit_s)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()  # now only the child holds it, and its death is an end of file here
        self.ready = False
        self.job: int | None = None
        self.deadline = time.monotonic() + START_LIMIT_S

    def send(self, job: int, pair: tuple[str, str]) -> bool:
        """Hands over a job and starts its clock; False if the process is gone."""
        try:
            self.conn.send(pair)
        except OSError:
            return False
        self.job = job
        self.deadline = time.monotonic() + self.limit_s + GRACE_S
        return True

    def rest(self) -> None:
        self.ready, self.job, self.deadline = True, None, math.inf

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.conn.close()

    def restart(self) -> None:
        self.stop()
        self.start()


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
    workers.clear()


class VerifyPool:
    """Checks (answer, gold) pairs in processes, each within `limit_s` seconds of its own start.

    The processes start at the first call and end with `close`, the `with` block or the program.
    Starting (seconds) and waiting in the queue count against nobody's limit. Calls from several
    threads take turns.
    """

    def __init__(self, workers: int = 2, limit_s: float = 5.0) -> None:
        if workers < 1 or not limit_s > 0:
            raise ValueError(
                f"workers={workers}, limit_s={limit_s}; use at least 1 worker and a positive limit"
            )
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MATH-type answers need math-verify: pip install math-verify")
        self.size = workers
        self.limit_s = limit_s
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._failed_starts = 0
        self.close = weakref.finalize(self, _stop_all, self._workers)  # also runs at exit

    def __enter__(self) -> VerifyPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def pids(self) -> list[int]:
        """Process ids of the workers, for tests and monitors."""
        return [worker.process.pid for worker in self._workers]

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """The verdict on each (answer, gold); texts as `math_verify.parse` takes them.

        Raises:
          RewardError: if the workers cannot be started.
        """
        if not self.close.alive:
            raise RuntimeError("this pool is closed; make a new one")
        results: dict[int, Verdict] = {}
        queue: deque[int] = deque()
        for i, (answer, gold) in enumerate(pairs):
            if not answer.strip():
                results[i] = Verdict.UNPARSABLE
            elif answer == gold:
                results[i] = Verdict.CORRECT
            else:
                queue.append(i)
        if queue:
            with self._lock:
                try:
                    self._run(pairs, queue, results)
                finally:  # interrupted: a late reply must not be taken for the next call's
                    for worker in self._workers:
                        if worker.job is not None:
                            worker.restart()
        return [results[i] for i in range(len(pairs))]

    def _run(
        self, pairs: Sequence[tuple[str, str]], queue: deque[int], results: dict[int, Verdict]
    ) -> None:
        while len(self._workers) < self.size:
            self._workers.append(_Worker(self.limit_s))
        while queue or any(w.job is not None for w in self._workers):
            for worker in self._workers:
                if queue and worker.ready and worker.job is None:
                    if worker.send(queue[0], pairs[queue[0]]):
                        queue.popleft()
                    else:
                        worker.restart()  # it was killed while idle: no check is lost
            wait_s = min(w.deadline for w in self._workers) - time.monotonic()
            timeout = None if math.isinf(wait_s) else max(wait_s, 0.0)
            readable = connection.wait([w.conn for w in self._workers], timeout)
            for worker in self._workers:
                if worker.conn in readable:
                    self._receive(worker, results)
                elif time.monotonic() >= worker.deadline:
                    self._expire(worker, results)

    def _receive(self, worker: _Worker, results: dict[int, Verdict]) -> None:
        try:
            word, detail = worker.conn.recv()
        except (EOFError, OSError):
            if worker.job is not None:
                code = worker.process.wait()
                log.warning("math-verify process ended (%s) during a check; not scored", code)
                results[worker.job] = Verdict.CRASHED
            elif not worker.ready:
                self._count_failed_start(f"ended with code {worker.process.wait()}")
            worker.restart()
            return
        if word == "ready":
            self._failed_starts = 0
        elif word == "failed":
            raise base.RewardError(f"math-verify cannot be used here:\n{detail}")
        elif worker.job is not None:
            results[worker.job] = Verdict(word)
            if detail:
                log.warning("math-verify failed on an answer, not scored: %s", detail)
        worker.rest()

    def _expire(self, worker: _Worker, results: dict[int, Verdict]) -> None:
        if worker.job is not None:
            results[worker.job] = Verdict.TIMEOUT
        else:
            self._count_failed_start(f"were not ready after {START_LIMIT_S:g} s")
        worker.restart()

    def _count_failed_start(self, what: Any) -> None:
        self._failed_starts += 1
        if self._failed_starts >= 3:
            raise base.RewardError(
                f"three math-verify processes in a row {what} while starting; run "
                f"`{sys.executable} -c 'import math_verify'` to see why"
            )
