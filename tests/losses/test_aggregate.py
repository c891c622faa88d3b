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


def prepared(aggregate: L.LossTransform, mask, **fields):
    loss = L.chain(L.nll(), aggregate)
    batch = L.Batch(mask=jnp.asarray(mask, jnp.float32), **fields)
    return loss, *loss.prepare(batch, loss.init(batch))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["aggregation_modes", "aggregation_all_masked"])
def test_aggregates_equal_the_reference(name, mode):
    case = GOLDEN[name]
    loss, batch, state = prepared(MODES[mode], case["inputs"]["mask"])
    value, _ = loss(-jnp.asarray(case["inputs"]["values"]), batch, state)  # nll of -v is v
    np.testing.assert_allclose(value, case["expected"][mode], rtol=1e-6)


def test_the_prompt_mean_is_a_mean_of_means_over_prompts():
    # Plain loop: mean over the tokens of each prompt's responses, then over prompts with tokens.
    rng = np.random.default_rng(0)
    values, group = rng.normal(size=(6, 4)), np.array([8, 2, 8, 5, 2, 8])
    mask = (np.arange(4) < np.array([1, 4, 2, 0, 3, 4])[:, None]).astype(float)
    means = [
        (values * mask)[group == g].sum() / mask[group == g].sum() for g in (8, 2)
    ]  # prompt 5 has no token
    loss, batch, state = prepared(L.prompt_mean(), mask, group=jnp.asarray(group))
    value, _ = loss(-jnp.asarray(values, jnp.float32), batch, state)
    np.testing.assert_allclose(value, np.mean(means), rtol=1e-5)


@pytest.mark.parametrize("horizon", [0, -8, float("inf"), float("nan")])
def test_a_horizon_that_is_no_length_is_refused(horizon):
    with pytest.raises(ValueError, match="length in tokens"):
        L.sequence_mean_token_sum_norm(horizon)


def test_each_update_divides_by_its_own_tokens():
    # trl#5619: two updates of 2 x 10 tokens from one generation of 40 gave 0.5, not 1.0.
    mask = jnp.ones((2, 10))
    for window in (mask, mask):
        loss, batch, state = prepared(L.token_mean(), window)
        parts = [
            loss(-jnp.ones((1, 10)), jax.tree.map(lambda x, i=i: x[i : i + 1], batch), state)[0]
            for i in range(2)
        ]
        np.testing.assert_allclose(sum(parts), 1.0, rtol=1e-6)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_accumulation_does_not_divide_again(pieces):
    # ms-swift#10117: with a loss of 2 x, d(loss)/dx must be 2 for every accumulation.
    loss, batch, state = prepared(L.token_mean(), np.tri(4, 5) > 0)  # rows of 1, 2, 3, 4 tokens

    def value(x):
        total = 0.0
        for i in range(pieces):
            rows = slice(i * 4 // pieces, (i + 1) * 4 // pieces)
            part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
            total += loss(jnp.full(part.mask.shape, -2.0) * x, part, state)[0]
        return total

    np.testing.assert_allclose(jax.value_and_grad(value)(1.0), (2.0, 2.0), rtol=1e-6)


def test_one_denominator_for_all_ranks():
    # prime-rl#2358: ranks with 1 and 9 tokens, gradient 1 on the first: 1/10, not 1/2.
    mask = np.zeros((2, 9))
    mask[0, 0], mask[1] = 1, 1
    loss, batch, state = prepared(L.token_mean(), mask)

    def rank(x, row):
        part = jax.tree.map(lambda leaf: leaf[row : row + 1], batch)
        return loss(-x * (1 - row) * jnp.ones((1, 9)), part, state)[0]

    gradients = [jax.grad(rank)(1.0, row) for row in range(2)]
    np.testing.assert_allclose(sum(gradients), 0.1, rtol=1e-6)


def test_truncated_responses_leave_both_lines_of_the_fraction():
    # trl#6369: 10 tokens kept over a denominator of 40 gave 0.25, not 1.0.
    mask = np.zeros((2, 30))
    mask[0, :10], mask[1] = 1, 1
    loss = L.chain(L.drop_truncated(), L.nll(), L.token_mean())
    for truncated, expected in (([0.0, 1.0], 1.0), ([1.0, 1.0], 0.0)):
        batch = L.Batch(
            mask=jnp.asarray(mask), truncated=jnp.asarray(truncated), length=jnp.ones(2)
        )
        batch, state = loss.prepare(batch, loss.init(batch))
        fn = jax.value_and_grad(lambda x, b=batch, s=state: loss(x, b, s)[0])
        value, gradient = fn(-jnp.ones((2, 30)))
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        assert jnp.all(gradient[1] == 0) and jnp.all(jnp.isfinite(gradient))
        assert jnp.all(batch.length == 1)  # raw counters stay


def test_metrics_weigh_each_token_once():
    # trl#6380: entropies 2.0 of 1 token and 1.0 of 99 tokens were logged as 1.5, not 1.01;
    # verl#4711: logged numbers depended on the microbatch size.
    mask = np.zeros((2, 99), np.float32)
    mask[0, 0], mask[1] = 1, 1
    loss = L.chain(L.nll(), L.entropy_bonus(0.0), L.token_mean())
    batch, state = loss.prepare(L.Batch(mask=jnp.asarray(mask)), ((), (), ()))
    entropy = jnp.asarray([[2.0], [1.0]]) * jnp.ones((2, 99))
    total = None
    for row in range(2):
        part = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], (batch, entropy))
        _, metrics = loss(-jnp.ones((1, 99)), part[0], state, entropy=part[1])
        total = metrics["entropy"] if total is None else total + metrics["entropy"]
    assert total is not None
    np.testing.assert_allclose(total.mean, 1.01, rtol=1e-6)
