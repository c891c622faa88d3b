"""Rollouts without a model: completions are given, so that every array is known beforehand."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest

from rljax.decode.batching import Completion
from rljax.envs.single_turn import Example
from rljax.rollout import sync


def completion(ids: list[int], reason: Literal["stop", "length"] = "stop") -> Completion:
    n = len(ids)
    logp = -np.asarray(ids, np.float32) / 10  # so that a log-prob tells its token
    return Completion(np.asarray(ids, np.int32), logp, 2 * logp, np.zeros(n, np.int32), reason)


def collect(groups: list[list[list[int]]], reward: Any, prompts: Any = None) -> sync.Rollout:
    """A rollout with ids joined by spaces as texts; prompt p is [7] * (p + 1)."""
    prompts = prompts or [[7] * (p + 1) for p in range(len(groups))]
    examples = [Example(uid=10 + p, prompt=f"prompt {p}") for p in range(len(groups))]
    return sync.collect(
        [[completion(ids) for ids in group] for group in groups],
        lambda ids: " ".join(map(str, ids)), reward, examples, prompts,
    )  # fmt: skip


def total(texts: Any, examples: Any) -> list[float | None]:
    """Sum of the ids; no opinion on those that hold a 9."""
    del examples
    ids = [[int(word) for word in text.split()] for text in texts]
    return [None if 9 in row else float(sum(row)) for row in ids]


GROUPS = [[[1, 2, 3], [4]], [[], [5, 6]], [[9], [8, 8]]]


@pytest.fixture(scope="module")
def rollout() -> sync.Rollout:
    return collect(GROUPS, total)


def test_ids_and_log_probs_reach_the_batch_unchanged(rollout):
    prompt, prompt_length, response, batch = sync.to_arrays(rollout, 5, 4)
    assert prompt.tolist() == [[7, 0, 0, 0, 0], [7, 7, 0, 0, 0], [7, 7, 7, 0, 0]]
    assert prompt_length.tolist() == [1, 2, 3]
    assert response.shape == (3, 2, 4) and np.shape(batch.mask) == (6, 4)
    flat = [ids for group in GROUPS for ids in group]
    for i, ids in enumerate(flat):
        n = len(ids)
        assert response.reshape(6, 4)[i, :n].tolist() == ids
        np.testing.assert_array_equal(np.asarray(batch.logp_sampler)[i, :n], -np.float32(ids) / 10)
        assert batch.mask[i].tolist() == [1.0] * n + [0.0] * (4 - n)
    assert np.asarray(batch.length).tolist() == [3, 1, 0, 2, 1, 2]


def test_an_empty_completion_keeps_its_reward_and_trains_no_token(rollout):
    # Row 2 is the empty one: its reward, the sum of nothing, counts in its group's baseline.
    *_, batch = sync.to_arrays(rollout, 5, 4)
    assert float(batch.mask[2].sum()) == 0.0 and np.asarray(batch.reward)[2] == 0.0
    assert sync.statistics(rollout)["length/empty"] == 1.0


def test_a_sample_without_a_score_is_nan_counted_and_out_of_the_mean(rollout):
    np.testing.assert_array_equal(rollout.reward, [6, 4, 0, 11, np.nan, 16])
    values = sync.statistics(rollout)
    assert values["reward/not_scored"] == 1.0
    assert values["reward/mean"] == pytest.approx((6 + 4 + 0 + 11 + 16) / 5)


def test_groups_go_by_place_even_where_prompts_are_equal():
    rollout = collect([[[1], [2]], [[3], [4]]], total, prompts=[[7, 7], [7, 7]])
    *_, batch = sync.to_arrays(rollout, 2, 1)
    assert np.asarray(batch.group).tolist() == [0, 0, 1, 1]


def test_a_group_is_mixed_where_its_scored_rewards_differ():
    rollout = collect([[[1], [2]], [[3], [3]], [[9], [4]], [[9], [9]]], total)
    assert rollout.mixed().tolist() == [True, False, False, False]


def test_take_and_join_move_prompt_samples_and_rewards_together(rollout):
    joined = rollout.take([2, 0]).join(rollout.take([1]))
    assert [len(p) for p in joined.prompts] == [3, 1, 2]
    assert [e.uid for e in joined.examples] == [12, 10, 11]
    assert joined.texts == ["9", "8 8", "1 2 3", "4", "", "5 6"]
    assert [c.ids.tolist() for c in joined.flat] == [[9], [8, 8], [1, 2, 3], [4], [], [5, 6]]
    np.testing.assert_array_equal(joined.reward, [np.nan, 16, 6, 4, 0, 11])
    assert joined.counts["not_scored"] == 2  # one of each part: counts are of all that was sampled


def test_truncation_is_the_share_that_met_the_limit():
    groups = [[completion([1], "length"), completion([2, 3])]]
    rollout = sync.Rollout([[7]], groups, [Example(0, "p")], ["1", "2 3"], np.zeros(2), {})
    *_, batch = sync.to_arrays(rollout, 1, 2)
    assert np.asarray(batch.truncated).tolist() == [1.0, 0.0]
    values = sync.statistics(rollout)
    assert values["length/truncated"] == 0.5
    assert values["length/mean_tokens"] == 1.5 and values["length/max_tokens"] == 2.0


def test_log_probs_that_do_not_match_the_ids_are_refused():
    broken = Completion(*(np.zeros(n, np.int32) for n in (3, 2, 2, 2)), "stop")  # pyright: ignore
    rollout = sync.Rollout([[7]], [[broken]], [Example(0, "p")], [""], np.zeros(1), {})
    with pytest.raises(ValueError, match="3 ids and 2 log-probs"):
        sync.to_arrays(rollout, 1, 4)


def test_likeliest_ids_reach_the_batch_and_their_contract_is_checked():
    def record(c: Completion, logp: Any = None, ids: Any = None) -> Completion:
        top = np.stack([c.ids, np.full_like(c.ids, 11), np.full_like(c.ids, -1)], -1)
        values = np.stack([c.logp, np.full_like(c.logp, -9.0), np.zeros_like(c.logp)], -1)
        return dataclasses.replace(
            c, topk_ids=top if ids is None else ids, topk_logp=values if logp is None else logp
        )

    def arrays(**broken: Any) -> Any:
        made = collect([[[1, 2, 3], []]], total)
        first, empty = made.flat
        completions = [[record(first, **broken), record(empty)]]
        return sync.to_arrays(dataclasses.replace(made, completions=completions), 2, 4)[3]

    batch = arrays()
    assert batch.topk_ids[0].tolist() == [[1, 11, -1], [2, 11, -1], [3, 11, -1], [-1] * 3]
    np.testing.assert_allclose(batch.topk_logp[0, 1], [-0.2, -9.0, 0.0])
    assert (batch.topk_ids[1] == -1).all()
    good = np.asarray([[-0.1, -9.0, 0.0], [-0.2, -9.0, 0.0], [-0.3, -9.0, 0.0]], np.float32)
    for value, message in ((np.nan, "finite"), (-0.1, "probability"), (-0.5, "differs")):
        bad = good.copy()
        bad[1] = [value, 0.0 if value == -0.1 else -9.0, 0.0]
        with pytest.raises(ValueError, match=message):
            arrays(logp=bad)
    with pytest.raises(ValueError, match="twice"):
        arrays(ids=np.asarray([[1, 11, -1], [2, 2, -1], [3, 11, -1]], np.int32))
