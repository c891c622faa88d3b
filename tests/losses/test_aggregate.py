"""Aggregates: their denominators, and the normalisation faults that other libraries had."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L

CASES = json.loads((Path(__file__).parents[1] / "golden" / "policy_losses.json").read_text())
GOLDEN = {case["name"]: case for case in CASES["cases"]}
MODES = {
    "token-mean": L.token_mean(),
    "token-sum": L.token_sum(),
    "seq-mean-token-sum": L.sequence_mean_token_sum(),
    "seq-mean-token-mean": L.sequence_mean_token_mean(),
    "seq-mean-token-sum-norm@8": L.sequence_mean_token_sum_norm(8),
}


def total(loss: L.LossTransform, batch: L.Batch, logp, pieces: int = 1, **live):
    """(value, metrics), gradient, prepared batch: rows cut into pieces, the results added."""

    @jax.jit
    def run(logp, batch, live):
        batch, state = loss.prepare(batch, loss.init(batch))

        def add(x):
            value, metrics = jnp.zeros(()), {}
            for i in range(pieces):
                rows = slice(i * len(x) // pieces, (i + 1) * len(x) // pieces)
                cut = jax.tree.map(lambda leaf, rows=rows: leaf[rows], (x, batch, live))
                part, new = loss(cut[0], cut[1], state, **cut[2])
                value += part
                metrics = {k: metrics[k] + m if metrics else m for k, m in new.items()}
            return value, metrics

        return *jax.value_and_grad(add, has_aux=True)(logp), batch

    return jax.device_get(run(jnp.asarray(logp, jnp.float32), batch, live))


def masked(mask, **fields) -> L.Batch:
    return L.Batch(mask=jnp.asarray(np.asarray(mask, np.float32)), **fields)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["aggregation_modes", "aggregation_all_masked"])
def test_aggregates_equal_the_reference(name, mode):
    case = GOLDEN[name]
    loss, values = L.chain(L.nll(), MODES[mode]), np.array(case["inputs"]["values"])
    (value, _), _, _ = total(loss, masked(case["inputs"]["mask"]), -values)  # nll of -v is v
    np.testing.assert_allclose(value, case["expected"][mode], rtol=1e-6)


def test_the_prompt_mean_is_a_mean_of_means_over_prompts():
    # Plain loop: mean over the tokens of each prompt's responses, then over prompts with tokens.
    rng = np.random.default_rng(0)
    values, group = rng.normal(size=(6, 4)), np.array([8, 2, 8, 5, 2, 8], np.int32)
    mask = np.arange(4) < np.array([1, 4, 2, 0, 3, 4])[:, None]  # prompt 5 has no token
    means = [(values * mask)[group == g].sum() / mask[group == g].sum() for g in (8, 2)]
    loss = L.chain(L.nll(), L.prompt_mean())
    (value, _), _, _ = total(loss, masked(mask, group=jnp.asarray(group)), -values)
    np.testing.assert_allclose(value, np.mean(means), rtol=1e-5)


@pytest.mark.parametrize("horizon", [0, -8, float("inf"), float("nan")])
def test_a_horizon_that_is_no_length_is_refused(horizon):
    with pytest.raises(ValueError, match="length in tokens"):
        L.sequence_mean_token_sum_norm(horizon)


SFT = L.chain(L.nll(), L.token_mean())


def test_each_update_divides_by_its_own_tokens():
    # trl#5619: two updates of 2 x 10 tokens from one generation of 40 gave 0.5, not 1.0.
    (value, _), gradient, _ = total(SFT, masked(np.ones((2, 10))), -np.ones((2, 10)), pieces=2)
    np.testing.assert_allclose(value, 1.0, rtol=1e-6)
    np.testing.assert_allclose(gradient, -1 / 20, rtol=1e-6)


def test_accumulation_does_not_divide_again():
    # ms-swift#10117: a loss of 2 x at x = 1: d(loss)/dx = sum of gradient * logp is 2 for each cut.
    mask, logp = np.tri(4, 5), np.full((4, 5), -2.0)  # rows of 1, 2, 3, 4 tokens
    for pieces in (1, 2, 4):
        (value, _), gradient, _ = total(SFT, masked(mask), logp, pieces)
        np.testing.assert_allclose((value, np.sum(gradient * logp)), (2.0, 2.0), rtol=1e-6)


def test_one_denominator_for_all_ranks():
    # prime-rl#2358: ranks with 1 and 9 tokens, gradient 1 on the first: 1/10, not 1/2.
    mask = np.zeros((2, 9))
    mask[0, 0], mask[1] = 1, 1
    _, gradient, _ = total(SFT, masked(mask), -np.ones((2, 9)), pieces=2)
    np.testing.assert_allclose(gradient[0, 0], -0.1, rtol=1e-6)


@pytest.mark.parametrize(("truncated", "expected"), [([0.0, 1.0], 1.0), ([1.0, 1.0], 0.0)])
def test_truncated_responses_leave_both_lines_of_the_fraction(truncated, expected):
    # trl#6369: 10 tokens kept over a denominator of 40 gave 0.25, not 1.0.
    mask = np.arange(30) < np.array([[10], [30]])
    length, truncated = jnp.asarray([10, 30]), jnp.asarray(truncated)
    loss = L.chain(L.drop_truncated(), SFT)
    batch = masked(mask, truncated=truncated, length=length)
    (value, _), gradient, batch = total(loss, batch, -np.ones((2, 30)))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert np.all(gradient[1] == 0) and np.all(np.isfinite(gradient))
    assert batch.length.tolist() == [10, 30]  # raw counters stay


def test_metrics_weigh_each_token_once():
    # trl#6380: entropies 2.0 of 1 token and 1.0 of 99 tokens were logged as 1.5, not 1.01;
    # verl#4711: logged numbers depended on the microbatch size.
    mask = np.zeros((2, 99))
    mask[0, 0], mask[1] = 1, 1
    loss = L.chain(L.nll(), L.entropy_bonus(0.0), L.token_mean())
    entropy = jnp.asarray(np.array([[2.0], [1.0]], np.float32) * np.ones((2, 99), np.float32))
    for pieces in (1, 2):
        (_, metrics), _, _ = total(loss, masked(mask), -np.ones((2, 99)), pieces, entropy=entropy)
        np.testing.assert_allclose(metrics["entropy"].sum, 101, rtol=1e-6)
        np.testing.assert_allclose(metrics["entropy"].mean, 1.01, rtol=1e-6)
