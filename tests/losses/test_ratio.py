"""Ratios: anchors, levels and the clamp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L


def run(ratio: L.LossTransform, logp, mask, advantage, **anchors):
    """(value, gradient) of the token sum of -A g."""
    loss = L.chain(ratio, L.token_sum())
    arrays = dict(mask=mask, advantage=advantage, **anchors)
    batch = L.Batch(**{k: jnp.asarray(np.asarray(x, np.float32)) for k, x in arrays.items()})

    @jax.jit
    def value_and_gradient(logp, batch):
        batch, state = loss.prepare(batch, loss.init(batch))
        return jax.value_and_grad(lambda x: loss(x, batch, state)[0])(logp)

    return jax.device_get(value_and_gradient(np.asarray(logp, np.float32), batch))


@pytest.mark.parametrize(
    ("anchor", "field"),
    [("old", "logp_old"), ("sampler", "logp_sampler"), ("reference", "logp_ref")],
)
def test_the_anchor_names_its_field(anchor, field):
    ones = np.ones((1, 2))
    value, gradient = run(L.token_ratio(anchor), -ones, ones, ones, **{field: -ones - 0.5})
    np.testing.assert_allclose(value, -2 * np.exp(0.5), rtol=1e-6)
    np.testing.assert_allclose(gradient, -np.exp(0.5) * ones, rtol=1e-6)
    assert L.token_ratio(anchor).needs == {field}


def test_product_and_geometric_mean_are_two_modes():
    # trl#5814: 1,000 tokens of log ratio 0.001: e as a product, 1.001 as a geometric mean.
    ones = np.ones((1, 1000))
    logp = 0.001 * ones - 1.0
    for make, ratio in ((L.sequence_ratio, np.e), (L.geometric_ratio, np.exp(0.001))):
        value, gradient = run(make(), logp, ones, ones, logp_old=-ones)
        np.testing.assert_allclose(value, -1000 * ratio, rtol=1e-4)  # a sum of 1,000 in float32
        np.testing.assert_allclose(gradient, -ratio * ones, rtol=1e-4)


@pytest.mark.parametrize("make", [L.sequence_ratio, L.geometric_ratio])
def test_padding_does_not_enter_a_sequence(make):
    # AReaL#1346: mask [1,1,0,0] and advantages [1,1,10,10] gave a mean of 5.5.
    mask, zeros = [[1, 1, 0, 0]], np.zeros((1, 4))
    for junk in (10.0, np.nan):
        old, advantage = [[0, 0, junk, junk]], [[1, 1, junk, junk]]
        value, gradient = run(make(), zeros, mask, advantage, logp_old=old)
        assert value == -2 and gradient.tolist() == [[-1, -1, 0, 0]]


def test_the_sequence_ratio_equals_the_product_and_its_gradient():
    # d(-A prod r)/d logp_t = -A prod r for each token of the sequence.
    rng = np.random.default_rng(1)
    logp, old = 0.2 * rng.normal(size=(2, 2, 3))
    mask, a = np.array([[1, 1, 1], [1, 0, 1]]), np.array([[0.7], [-1.2]])
    product = np.exp(np.sum((logp - old) * mask, axis=1, keepdims=True))
    _, gradient = run(L.sequence_ratio(), logp, mask, a * np.ones((2, 3)), logp_old=old)
    np.testing.assert_allclose(gradient, -a * product * mask, rtol=1e-5)


def test_beyond_the_clamp_the_ratio_is_constant():
    ones = np.ones((1, 3))
    logp = [[0.0, -50.0, 50.0]]
    value, gradient = run(L.token_ratio(clamp=2.0), logp, ones, ones, logp_old=0 * ones)
    np.testing.assert_allclose(value, -(1 + np.exp(-2) + np.exp(2)), rtol=1e-6)
    assert gradient.tolist() == [[-1, 0, 0]]


def test_unknown_anchors_and_clamps_are_refused():
    with pytest.raises(ValueError, match="old, sampler, reference"):
        L.token_ratio("behaviour")  # pyright: ignore[reportArgumentType]
    for clamp in (0.0, -1.0, 1000.0):
        with pytest.raises(ValueError, match="clamp"):
            L.geometric_ratio(clamp=clamp)
