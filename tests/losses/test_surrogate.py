"""Surrogates against the papers' equations on a grid of ratios and advantages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L

RATIO = np.array([0.3, 0.79, 0.81, 1.0, 1.19, 1.27, 1.29, 4.0], np.float32)
ADVANTAGE = np.array([[1.5], [-0.5], [0.0]], np.float32)
SHAPE = (3, 8)


def run(*surrogates: L.LossTransform):
    """(per-token objective, its gradient, metrics) on the grid."""
    loss = L.chain(L.token_ratio(), *surrogates, L.token_sum())

    @jax.jit
    def everything(logp, advantage):
        batch = L.Batch(mask=jnp.ones(SHAPE), advantage=advantage, logp_old=jnp.full(SHAPE, -1.0))
        batch, state = loss.prepare(batch, loss.init(batch))
        gradient, metrics = jax.grad(lambda x: loss(x, batch, state), has_aux=True)(logp)
        each = jnp.eye(24).reshape(24, *SHAPE)
        tokens = jax.vmap(lambda w: loss(logp, batch.replace(weight=w), state)[0])(each)
        return -tokens.reshape(SHAPE), -gradient, metrics

    logp = np.broadcast_to(np.log(RATIO) - 1, SHAPE)
    return jax.device_get(everything(logp, np.broadcast_to(ADVANTAGE, SHAPE)))


def test_clip_ratio_equals_the_minimum_of_the_paper():
    # PPO equation 7, and its derivative r A where the first argument is the smaller.
    plain, clipped = RATIO * ADVANTAGE, np.clip(RATIO, 0.8, 1.28) * ADVANTAGE
    value, gradient, metrics = run(L.clip_ratio(0.2, 0.28))
    np.testing.assert_allclose(value, np.minimum(plain, clipped), rtol=1e-5)
    live = plain <= clipped
    np.testing.assert_allclose(gradient, np.where(live, plain, 0.0), rtol=1e-5)
    assert metrics["ratio/clipped"].sum == np.sum(~live) == 4  # 1.29, 4.0 up; 0.3, 0.79 down
    assert metrics["ratio/clipped"].weight == 24


def test_dual_clip_caps_the_ratio_of_bad_tokens():
    value, gradient, metrics = run(L.clip_ratio(0.2, 0.2), L.dual_clip(3.0))
    assert metrics["ratio/dual_clipped"].sum == 1  # ratio 4.0 with A < 0
    np.testing.assert_allclose(value[1, 7], -1.5, rtol=1e-6)
    assert gradient[1, 7] == 0
    np.testing.assert_allclose(value[0, 7], 1.8, rtol=1e-6)


def test_the_score_form_gives_each_token_its_clipped_ratio():
    _, gradient, metrics = run(L.score(0.8, 1.28))
    np.testing.assert_allclose(gradient, np.clip(RATIO, 0.8, 1.28) * ADVANTAGE, rtol=1e-5)
    assert metrics["ratio/clipped"].sum == 12


def test_the_score_form_without_bounds_has_the_gradient_of_the_ratio():
    np.testing.assert_allclose(run(L.score())[1], run()[1], rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: L.clip_ratio(0.0, 0.2),
        lambda: L.clip_ratio(1.1, 0.2),
        lambda: L.clip_ratio(0.2, 0.0),
        lambda: L.clip_ratio(0.2, float("nan")),
        lambda: L.dual_clip(1.0),
        lambda: L.score(-0.1, 2.0),
        lambda: L.score(0.0, 0.9),
    ],
)
def test_thresholds_out_of_range_are_refused(make):
    with pytest.raises(ValueError):
        make()
