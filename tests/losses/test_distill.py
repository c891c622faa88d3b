"""Negative log-likelihood."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rljax import losses as L


def test_sft_is_the_mean_negative_log_likelihood_of_trained_tokens():
    logp = jnp.asarray([[-1.0, -2.0, -4.0], [-0.5, jnp.nan, -jnp.inf]])
    mask = jnp.asarray([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    loss = L.algorithms.sft()
    batch, state = loss.prepare(L.Batch(mask=mask), loss.init(L.Batch(mask=mask)))
    value, gradient = jax.value_and_grad(lambda x: loss(x, batch, state)[0])(logp)
    np.testing.assert_allclose(value, (2 + 4 + 0.5) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, -mask / 3, rtol=1e-6)
    assert loss.needs == set()
