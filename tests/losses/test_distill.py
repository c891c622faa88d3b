"""Negative log-likelihood."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rljax import losses as L


def test_sft_is_the_mean_negative_log_likelihood_of_trained_tokens():
    logp = np.array([[-1.0, -2.0, -4.0], [-0.5, np.nan, -np.inf]], np.float32)
    mask = np.array([[0, 1, 1], [1, 0, 0]], np.float32)
    loss = L.algorithms.sft()

    @jax.jit
    def run(logp, batch):
        batch, state = loss.prepare(batch, loss.init(batch))
        return jax.value_and_grad(lambda x: loss(x, batch, state)[0])(logp)

    value, gradient = run(logp, L.Batch(mask=jnp.asarray(mask)))
    np.testing.assert_allclose(value, (2 + 4 + 0.5) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, -mask / 3, rtol=1e-6)
    assert loss.needs == set()
