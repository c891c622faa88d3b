"""What may come out of a reward function, and what is said when it is wrong."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rljax.rewards import base


@dataclasses.dataclass
class Row:
    uid: int
    prompt: str = "q"
    answer: str = "1"
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


ROWS = [Row(10), Row(11), Row(12)]
TEXTS = ["a", "", "c"]


def returns(*values):
    def made_up(texts, examples):
        return list(values)

    return made_up


def test_zero_is_a_score_and_none_is_not():
    """FC52: 0.0 must not be taken for missing. FC53: None is left out and counted."""
    scores = base.call_reward(returns(0.0, None, 1), TEXTS, ROWS)
    assert scores.value.tolist() == [0.0, 0.0, 1.0]
    assert scores.scored.tolist() == [True, False, True]
    assert scores.counts == {"not_scored": 1}


def test_a_group_in_which_nothing_is_scored_passes():
    assert not base.call_reward(returns(None, None, None), TEXTS, ROWS).scored.any()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), np.float32("nan")])
def test_a_reward_that_is_not_finite_names_function_and_row(bad):
    with pytest.raises(base.RewardError, match=r"made_up returned .* row uid 11; .*finite"):
        base.call_reward(returns(1.0, bad, 0.0), TEXTS, ROWS)


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        ([1.0, 2.0], "returned 2 values for 3 completions"),
        ([1.0, 2.0, 3.0, 4.0], "returned 4 values for 3 completions"),
        ([1.0, "good", 1.0], "'good' for row uid 11, which is not a number"),
        ([1.0, [1.0], 1.0], r"\[1.0\] for row uid 11"),
    ],
)
def test_a_wrong_return_value_is_named(values, fact):
    with pytest.raises(base.RewardError, match=fact):
        base.call_reward(returns(*values), TEXTS, ROWS)


def test_a_single_number_for_a_batch_is_refused():
    with pytest.raises(base.RewardError, match=r"returned a float.*rljax\.rewards\.each"):
        base.call_reward(lambda texts, examples: 1.0, TEXTS, ROWS)  # pyright: ignore


def test_arrays_and_booleans_are_numbers():
    by_array = base.call_reward(lambda t, e: np.array([1, 0, 2]), TEXTS, ROWS)  # pyright: ignore
    assert by_array.value.tolist() == [1.0, 0.0, 2.0]
    assert base.call_reward(returns(True, False, True), TEXTS, ROWS).value.tolist() == [1, 0, 1]


def test_an_exception_names_function_row_and_cause():
    def divide(texts, examples):
        return [1 / len(text) for text in texts]  # the second text is empty

    with pytest.raises(base.RewardError, match=r"divide raised ZeroDivisionError.*row uid 11"):
        base.call_reward(divide, TEXTS, ROWS)
    with pytest.raises(base.RewardError, match=r"<lambda> raised ZeroDivisionError.*row uid 11"):
        base.call_reward(base.each(lambda text, example: 1 / len(text)), TEXTS, ROWS)


def test_an_exception_of_the_batch_alone_still_names_the_function():
    def only_pairs(texts, examples):
        raise (KeyError if len(texts) > 1 else AssertionError)("batch")

    with pytest.raises(base.RewardError, match="only_pairs raised"):
        base.call_reward(only_pairs, TEXTS, ROWS)


def test_an_empty_completion_reaches_the_function_as_empty_text():
    """FC51: an empty completion is scored like any other."""
    seen = []

    def remember(text, example):
        seen.append((example.uid, text))
        return 0.5

    scores = base.call_reward(base.each(remember), TEXTS, ROWS)
    assert seen == [(10, "a"), (11, ""), (12, "c")]
    assert scores.scored.all()


def test_a_sum_of_rewards_is_weighted_and_keeps_none():
    total = base.combine((returns(1.0, 1.0, None), 2.0), (returns(0.5, None, 1.0), -1.0))
    scores = base.call_reward(total, TEXTS, ROWS)
    assert scores.value.tolist() == [2.0 * 1.0 - 0.5, 0.0, 0.0]
    assert scores.scored.tolist() == [True, False, False]


def test_an_empty_sum_is_refused_when_it_is_built():
    """FC57: a list of rewards without a function is a message at construction."""
    with pytest.raises(ValueError, match="at least one"):
        base.combine()
    with pytest.raises(ValueError, match=r"\(function, weight\) pairs"):
        base.combine(returns(1.0))  # pyright: ignore


class Counting:
    """A reward that counts one event a call."""

    def __init__(self):
        self.counts = Counter(slow=0)

    def __call__(self, texts, examples):
        self.counts["slow"] += 1
        return [0.0] * len(texts)


@pytest.mark.parametrize("wrap", [lambda fn: fn, lambda fn: base.combine((fn, 1.0))])
def test_counts_are_those_of_one_call(wrap):
    fn = wrap(Counting())
    base.call_reward(fn, TEXTS, ROWS)
    assert base.call_reward(fn, TEXTS, ROWS).counts == {"slow": 1, "not_scored": 0}
