"""Evaluation on held-out rows, with a policy whose answers are known beforehand."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rljax import envs, metrics, report, rewards
from rljax.decode.batching import Completion, Request
from rljax.recipes import evaluate as recipe

WORDS = ["wrong", "right", "unclear"]
WRONG, RIGHT, UNCLEAR = range(3)


class FakePolicy:
    """Answers row u right when greedy if u is even, and sample s of it right if s < u."""

    def __init__(self, unclear: int = -1) -> None:
        self.cfg = types.SimpleNamespace(max_positions=32)
        self.tokenizer = types.SimpleNamespace(decode=lambda ids: WORDS[ids[0]])
        self.unclear = unclear
        self.requests: list[Request] = []
        self.version = 5

    def encode(self, prompt: str) -> list[int]:
        return [int(prompt.removeprefix("row "))] * 3

    def stop_ids(self, stop: tuple[str, ...]) -> tuple[int, ...]:
        return (9, 10) if stop else (9,)

    def run(self, requests: list[Request]) -> list[list[Completion]]:
        self.requests += requests
        return [[self._answer(r, s) for s in range(r.samples)] for r in requests]

    def _answer(self, request: Request, sample: int) -> Completion:
        row = request.prompt[0]
        right = row % 2 == 0 if request.temperature == 0 else sample < row
        word = UNCLEAR if row == self.unclear else RIGHT if right else WRONG
        return Completion(
            ids=np.asarray([word], np.int32),
            logp=np.zeros(1, np.float32),
            logp_full=np.zeros(1, np.float32),
            version=np.zeros(1, np.int32),
            stop_reason="length" if row == 4 else "stop",
        )


def judge(texts: Sequence[str], examples: Sequence[Any]) -> list[float | None]:
    del examples
    return [None if text == "unclear" else float(text == "right") for text in texts]


def make_task(test: int = 5) -> envs.Task:
    rows = [envs.Example(uid, f"row {uid}") for uid in range(test + 2)]
    return envs.Task("rows", rows[test:], rows[:test], judge, ("\n",), max_tokens=20)


def evaluate(policy: FakePolicy, task: envs.Task, **settings: Any) -> dict[str, Any]:
    return recipe.evaluate(policy, task, **settings)  # pyright: ignore[reportArgumentType]


def test_accuracies_are_means_over_rows_and_samples():
    result = evaluate(FakePolicy(), make_task(), samples=3)
    # greedy: rows 0, 2, 4 of 5; sampled: 0 + 1 + 2 + 3 + 3 right of 5 x 3
    assert result["greedy"] == pytest.approx(3 / 5)
    assert result["sampled"] == pytest.approx(9 / 15)
    assert result["count"] == 5 and result["not_scored"] == 0
    assert result["truncated"] == pytest.approx(1 / 5)  # row 4 of five


def test_every_row_is_asked_exactly_once():
    policy = FakePolicy()
    evaluate(policy, make_task(), samples=3, temperature=0.7)
    asked = Counter((r.prompt[0], r.temperature, r.samples) for r in policy.requests)
    assert asked == {(u, t, n): 1 for u in range(5) for t, n in ((0.0, 1), (0.7, 3))}
    assert {r.max_tokens for r in policy.requests} == {20}  # the task's
    assert {r.stop_ids for r in policy.requests} == {(9, 10)}


def test_a_seed_depends_on_the_row_alone():
    def seeds(task: envs.Task, **settings: Any) -> dict[int, int]:
        policy = FakePolicy()
        evaluate(policy, task, **settings)
        return {r.prompt[0]: r.seed for r in policy.requests if r.temperature > 0}

    every, some = seeds(make_task(5)), seeds(make_task(3))
    assert len(set(every.values())) == 5 and all(0 <= s < 2**31 for s in every.values())
    assert some == {u: every[u] for u in range(3)}
    assert seeds(make_task(3), seed=1) != some


def test_what_is_not_scored_is_left_out():
    result = evaluate(FakePolicy(unclear=3), make_task(), samples=2)
    # without row 3 greedy: 3 of 4; sampled: 0 + 1 + 2 + 2 of 4 x 2
    assert result["greedy"] == pytest.approx(3 / 4)
    assert result["sampled"] == pytest.approx(5 / 8)
    assert result["not_scored"] == 3 and result["count"] == 5


def test_texts_pair_greedy_and_sampled():
    result = evaluate(FakePolicy(), make_task(), samples=3, shown=2)
    assert result["texts"] == [
        {"prompt": "row 0", "text": "right", "reward": 1.0, "greedy": True},
        {"prompt": "row 0", "text": "wrong", "reward": 0.0, "greedy": False},
        {"prompt": "row 1", "text": "wrong", "reward": 0.0, "greedy": True},
        {"prompt": "row 1", "text": "right", "reward": 1.0, "greedy": False},
    ]


def test_the_training_rows_can_be_chosen():
    policy = FakePolicy()
    assert evaluate(policy, make_task(), split="train")["count"] == 2
    assert {r.prompt[0] for r in policy.requests} == {5, 6}


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"max_tokens": 30}, r"3 tokens; with max_tokens=30 that is past the model's 32 positions"),
        ({"samples": 0}, "samples=0.*at least one"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"split": "validation"}, "no rows in split 'validation'"),
    ],
)
def test_wrong_settings_are_refused_before_sampling(settings, fact):
    policy = FakePolicy()
    with pytest.raises(ValueError, match=fact):
        evaluate(policy, make_task(), **settings)
    assert policy.requests == []


def test_a_task_without_test_rows_is_refused():
    task = envs.custom(["row 0"], judge)
    with pytest.raises(ValueError, match="hold some out"):
        evaluate(FakePolicy(), task)


def test_a_reward_of_the_wrong_length_is_blamed():
    task = envs.custom(["row 0"], lambda texts, examples: [1.0], ["row 1"], max_tokens=20)
    with pytest.raises(rewards.RewardError, match="returned 1 values for 2 completions"):
        evaluate(FakePolicy(), task)


def test_a_run_writes_rows_that_the_report_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe.runs, "make_policy", lambda *_: FakePolicy())
    config = recipe.Config(model="fake", task=make_task, samples=3)
    for resume in (False, True):
        recipe.run(config, tmp_path, resume=resume)
    rows = metrics.read_rows(tmp_path / metrics.EVALS)  # once: the second run replaced the first
    assert rows == [
        {"step": 5, "phase": "test", "greedy": False, "accuracy": 9 / 15, "count": 5},
        {"step": 5, "phase": "test", "greedy": True, "accuracy": 3 / 5, "count": 5},
    ]
    assert len(metrics.read_rows(tmp_path / metrics.SAMPLES)) == 10
    assert "mean reward of 5 rows: 0.600 at temperature 1 (3 samples each)" in (
        capsys.readouterr().out
    )
    (tmp_path / metrics.METRICS).write_text("")
    assert "row 4" in report.write_report(tmp_path).read_text()
