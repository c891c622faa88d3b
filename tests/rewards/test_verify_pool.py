"""math-verify in processes: each check has its own clock, and none can stop the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljax.rewards import base, verify_pool
from rljax.rewards import math as answers

pytest.importorskip("math_verify")

V = verify_pool.Verdict
# Never ends; in a thread it froze a whole interpreter for a minute (measured).
TOWER = "\\boxed{9^{9^{9^{9}}}}"
HALF = ("\\boxed{0.5}", "\\boxed{\\frac{1}{2}}")
WRONG = ("\\boxed{2}", "\\boxed{\\frac{1}{2}}")


@pytest.fixture(scope="module")
def reward():
    with answers.MathReward(workers=2, limit_s=1.5) as made:
        made.pool.verdicts([HALF, HALF])  # start the processes once for the module
        yield made


def rows(*golds):
    return [SimpleNamespace(uid=i, answer=gold) for i, gold in enumerate(golds)]


@pytest.mark.parametrize(
    ("text", "gold", "verdict"),
    [  # data_models notes, section 5: pairs and verdicts as one would wish
        ("so \\boxed{\\frac{1}{2}}", "0.5", V.CORRECT),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", V.CORRECT),
        ("\\boxed{x=5}", "5", V.CORRECT),
        ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", V.CORRECT),
        ("thus\n#### 18", "18", V.CORRECT),
        ("The answer is 18 dollars", "18", V.CORRECT),
        ("\\boxed{18.9}", "\\$18.90", V.CORRECT),
        ("\\boxed{3.14159}", "\\pi", V.INCORRECT),
        ("\\boxed{19}", "18", V.INCORRECT),
        ("", "18", V.UNPARSABLE),
        ("\\boxed{}", "18", V.UNPARSABLE),
        ("I do not know", "18", V.UNPARSABLE),
        ("\\boxed{" + "1+" * 150 + "1}", "151", V.UNPARSABLE),  # 301 characters, limit 300
        ("\\boxed{1}", "", V.CRASHED),  # no reference: nothing can be said about the answer
    ],
)
def test_an_answer_gets_its_verdict(reward, text, gold, verdict):
    assert reward.verdicts([text], [gold]) == [verdict]


def test_a_hanging_answer_costs_its_own_limit_only(reward):
    """FC55: one hang among 8 on two workers; the batch ends within limit + 1 s."""
    pairs = [
        HALF,
        ("\\boxed{x}", "\\boxed{y}"),
        (TOWER, "\\boxed{1}"),
        HALF,
        WRONG,
        HALF,
        WRONG,
        HALF,
    ]
    start = time.monotonic()
    found = reward.pool.verdicts(pairs)
    assert time.monotonic() - start < reward.pool.limit_s + 1.0
    assert found[:5] == [V.CORRECT, V.INCORRECT, V.TIMEOUT, V.CORRECT, V.INCORRECT]
    assert found[5:] == [V.CORRECT, V.INCORRECT, V.CORRECT]


def test_timeouts_and_crashes_are_scored_as_told_and_counted(reward):
    texts = [TOWER, "\\boxed{1}", "\\boxed{1}", "?", "\\boxed{2}"]
    scores = base.call_reward(reward, texts, rows("1", "", "1", "1", "1"))
    assert scores.value.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert scores.scored.tolist() == [True, False, True, True, True]
    assert scores.counts == {"timeout": 1, "crashed": 1, "unparsable": 1, "not_scored": 1}


def test_the_timeout_score_is_a_setting():
    with answers.MathReward(workers=1, limit_s=1.0, timeout_score=-1.0) as made:
        assert made.score[V.TIMEOUT] == -1.0
        assert made.score[V.CRASHED] is None


def test_the_queue_does_not_count_against_the_limit():
    """FC56: 1 worker, 200 checks at once that together take longer than one limit."""
    pairs = [(f"\\boxed{{{i}+{i}}}", f"\\boxed{{{2 * i}}}") for i in range(1, 201)]
    with verify_pool.VerifyPool(workers=1, limit_s=1.0) as pool:
        assert pool.verdicts(pairs) == [V.CORRECT] * 200
        # The start of the process (seconds) did not count either: it had no limit of 1 s.


def altered(monkeypatch, body):
    """Lets the workers run `body` before each check of gold `\\boxed{1}`."""
    script = Path(verify_pool.__file__).with_name("verify_worker.py").read_text()
    before = f"    if gold == r'\\boxed{{1}}':\n        {body}\n"
    head = "def check(answer: str, gold: str) -> str:\n"
    assert head in script
    monkeypatch.setattr(verify_pool, "SCRIPT", ["-c", script.replace(head, head + before)])


def test_a_slow_check_late_in_the_queue_is_no_timeout(monkeypatch):
    """FC56 without luck: eight checks of 0.2 s on one worker whose limit is 1 s."""
    altered(monkeypatch, "import time; time.sleep(0.2)")
    with verify_pool.VerifyPool(workers=1, limit_s=1.0) as pool:
        start = time.monotonic()
        assert pool.verdicts([("\\boxed{1.0}", "\\boxed{1}")] * 8) == [V.CORRECT] * 8
        assert time.monotonic() - start > 1.0  # the queue was longer than one limit


def test_a_check_that_no_timer_can_end_is_killed(monkeypatch):
    """FC55: SIGALRM never arrives, as in a long computation in C; the next check still runs."""
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])"
    altered(monkeypatch, block + "\n        while True: pass")
    with verify_pool.VerifyPool(workers=1, limit_s=0.5) as pool:
        pool.verdicts([HALF])
        (first,) = pool.pids()
        start = time.monotonic()
        assert pool.verdicts([("\\boxed{2}", "\\boxed{1}")]) == [V.TIMEOUT]
        assert 0.5 < time.monotonic() - start < 1.5
        assert pool.verdicts([WRONG]) == [V.INCORRECT]
        assert pool.pids() != [first]


def test_the_clock_of_a_check_stops_with_it():
    with verify_pool.VerifyPool(workers=1, limit_s=0.5) as pool:
        pool.verdicts([HALF])
        before = pool.pids()
        time.sleep(0.8)  # longer than the limit
        assert pool.verdicts([WRONG]) == [V.INCORRECT]
        assert pool.pids() == before


def test_a_worker_killed_while_idle_costs_nothing(reward):
    for pid in reward.pool.pids():
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert reward.pool.verdicts([HALF, WRONG]) == [V.CORRECT, V.INCORRECT]


def test_a_worker_killed_during_a_check_is_reported_and_replaced(reward):
    pids = reward.pool.pids()  # one of them has the check
    kills = [threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)) for pid in pids]
    for kill in kills:
        kill.start()
    assert reward.pool.verdicts([(TOWER, "\\boxed{1}")]) == [V.CRASHED]
    for kill in kills:  # or the second may hit the next check
        kill.join()
    assert reward.pool.verdicts([HALF]) == [V.CORRECT]


def test_a_closed_pool_leaves_no_process_and_says_so():
    with verify_pool.VerifyPool(workers=1, limit_s=2.0) as pool:
        assert pool.verdicts([HALF]) == [V.CORRECT]
        (pid,) = pool.pids()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    pool.close()  # twice is no error
    with pytest.raises(RuntimeError, match="closed"):
        pool.verdicts([HALF])


SCRIPT = """
from rljax.rewards import verify_pool
print("top", flush=True)
pool = verify_pool.VerifyPool(workers=1, limit_s=2.0)
print(pool.verdicts([(r"\\\\boxed{0.5}", r"\\\\boxed{1/2}")]), pool.pids()[0], flush=True)
"""


def test_a_script_without_a_main_guard_works_and_ends_its_workers(tmp_path):
    """A config file has no `if __name__` line; children must not run it again."""
    (tmp_path / "config.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "config.py")], capture_output=True, text=True, timeout=60
    )
    top, result = done.stdout.splitlines()
    assert (top, done.stderr) == ("top", "")
    assert result.startswith("[<Verdict.CORRECT")
    with pytest.raises(ProcessLookupError):
        os.kill(int(result.split()[-1]), 0)


def test_workers_that_cannot_start_are_an_error_not_a_loop(monkeypatch):
    monkeypatch.setattr(verify_pool, "SCRIPT", ["-c", "raise SystemExit(3)"])
    with (
        verify_pool.VerifyPool(workers=1) as pool,
        pytest.raises(base.RewardError, match="three math-verify processes in a row ended with"),
    ):
        pool.verdicts([HALF])
