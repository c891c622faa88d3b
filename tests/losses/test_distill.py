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


def test_distillation_has_the_gradient_of_the_squared_log_ratio_to_the_teacher():
    rng = np.random.default_rng(0)
    logp, teacher = rng.uniform(-3, -0.1, (2, 2, 4)).astype(np.float32)
    mask = np.array([[1, 1, 1, 0], [1, 0, 1, 1]], np.float32)

    def gradient(loss):
        given = {"mask": mask, "logp_ref": teacher, "logp_sampler": logp}
        batch = L.Batch(**jax.tree.map(jnp.asarray, given))
        batch, state = loss.prepare(batch, loss.init(batch))
        return jax.grad(lambda x: loss(x, batch, state)[0])(jnp.asarray(logp))

    nothing = L.on_batch(lambda b: b.replace(advantage=0 * b.mask), gives=["advantage"], name="no")
    squared = L.chain(nothing, L.kl_to_reference(1.0, "k2"), L.token_mean())
    got = gradient(L.algorithms.distil())
    np.testing.assert_allclose(got, gradient(squared), rtol=1e-5)
    np.testing.assert_allclose(got, (logp - teacher) * mask / 6, rtol=1e-5, atol=1e-7)
