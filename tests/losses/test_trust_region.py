"""What trust regions and the surrogates beside them must do whatever the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L

B, T, V = 8, 6, 12
rng = np.random.default_rng(0)
BASE = rng.normal(size=(B, T, V))
LOG_MU, LOG_PI = (
    np.asarray(jax.nn.log_softmax(jnp.asarray(x, jnp.float32)))
    for x in (BASE, BASE + 0.7 * rng.normal(size=(B, T, V)))
)
TOKEN = rng.integers(0, V, (B, T))


def pick(x, ids):
    return jnp.take_along_axis(jnp.asarray(x), jnp.asarray(ids), -1)


def batch_of(log_mu=LOG_MU, k=V, **fields):
    ids = np.argsort(-log_mu, -1)[..., :k]
    values = {
        "mask": jnp.ones((B, T)),
        "advantage": jnp.asarray(rng.normal(size=(B, T)), jnp.float32),
        "logp_sampler": pick(log_mu, TOKEN[..., None])[..., 0],
        "token": jnp.asarray(TOKEN),
        "topk_ids": jnp.asarray(ids),
        "topk_logp": pick(log_mu, ids),
    }
    return L.Batch(**(values | fields))


def terms_of(batch, log_pi=LOG_PI):
    logp = pick(log_pi, TOKEN[..., None])[..., 0]
    zero = jnp.zeros((B, T))
    live = {
        "topk_logp_live": pick(log_pi, batch.topk_ids),
        "sum_squares": jnp.sum(jnp.exp(log_pi) ** 2, -1),
    }
    return L.Terms(logp, zero, logp, zero + 1, zero + 1, zero, live, {})


def gradient(loss, batch, log_pi=LOG_PI):
    terms = terms_of(batch, log_pi)
    batch, state = loss.prepare(batch, loss.init(batch))
    return jax.grad(lambda x: loss(x, batch, state, **terms.live)[0])(terms.logp)


def test_the_whole_vocabulary_as_top_k_is_the_full_divergence():
    batch = batch_of()
    mu, pi = np.exp(LOG_MU), np.exp(LOG_PI)
    full = {"tv": 0.5 * np.abs(mu - pi).sum(-1), "kl": (mu * (LOG_MU - LOG_PI)).sum(-1)}
    for kind, value in full.items():
        found = L.topk_divergence(kind).value(terms_of(batch), batch)
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-6)
    assert np.all(full["tv"] <= np.sqrt(full["kl"] / 2) + 1e-6)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_proportional_slope_is_the_derivative_of_the_coarse_divergence(kind):
    batch, divergence = batch_of(k=4), L.topk_divergence(kind)
    a, pi = jax.nn.one_hot(TOKEN, V), jnp.exp(LOG_PI)

    def value(s):
        moved = jax.nn.log_softmax(LOG_PI + s * (a - pi))
        return divergence.value(terms_of(batch, moved), batch)

    step = 1e-3
    slope = (value(step) - value(-step)) / (2 * step)
    found = divergence.slope(terms_of(batch), batch)
    np.testing.assert_allclose(found, slope, rtol=2e-2, atol=1e-3)


def test_without_a_bound_the_region_is_plain_importance_sampling():
    plain = L.chain(L.token_ratio("sampler"), L.token_mean())
    region = L.trust_region(L.binary_divergence("kl"), 1e6, 1e6)
    wide = L.chain(L.token_ratio("sampler"), region, L.score(), L.token_mean())
    flat = L.chain(L.token_ratio("sampler"), L.quadratic(1e9, "sampler"), L.token_mean())
    batch = batch_of()
    for loss in (wide, flat):
        np.testing.assert_allclose(gradient(loss, batch), gradient(plain, batch), rtol=1e-4)


def test_the_quadratic_gradient_vanishes_on_the_boundary_and_turns_beyond_it():
    batch = batch_of(advantage=jnp.ones((B, T)))
    gap = np.abs(np.exp(terms_of(batch).logp) - np.exp(batch.logp_sampler))
    at = np.unravel_index(
        np.argmax(
            np.where(np.asarray(terms_of(batch).logp) > np.asarray(batch.logp_sampler), gap, 0)
        ),
        gap.shape,
    )
    signs = []
    for scale in (0.9, 1.0, 1.1):
        loss = L.chain(
            L.token_ratio("sampler"), L.quadratic(float(gap[at]) / scale, "sampler"), L.token_mean()
        )
        signs.append(float(gradient(loss, batch)[at]))
    assert signs[0] < -1e-5 and abs(signs[1]) < 1e-6 and signs[2] > 1e-5


def test_a_token_at_the_threshold_is_kept_and_one_beyond_it_is_not():
    region = L.trust_region(L.binary_divergence("tv"), 0.25, 0.25)
    logp_sampler, logp = jnp.log(jnp.asarray([[0.5, 0.5]])), jnp.log(jnp.asarray([[0.75, 0.76]]))
    zero = jnp.zeros((1, 2))
    batch = L.Batch(mask=zero + 1, advantage=zero + 1, logp_sampler=logp_sampler)
    terms = L.Terms(logp, zero, logp, zero + 1, zero + 1, zero, {}, {})
    assert region.update(terms, batch, ()).keep.tolist() == [[1.0, 0.0]]
    back = batch.replace(advantage=-batch.advantage)  # such steps lead back
    assert region.update(terms, back, ()).keep.tolist() == [[1.0, 1.0]]


def test_a_sampler_that_was_certain_gives_a_finite_divergence():
    zero = jnp.zeros((1, 1))
    batch = L.Batch(mask=zero + 1, logp_sampler=zero)
    terms = L.Terms(zero - 1.0, zero, zero, zero, zero, zero, {}, {})
    np.testing.assert_allclose(L.binary_divergence("kl").value(terms, batch), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: L.trust_region(L.binary_divergence(), 0.0, 0.2), "low=0.0 of trust_region"),
        (lambda: L.trust_region(L.binary_divergence(), 0.2, 1.5), "high=1.5 of trust_region"),
        (
            lambda: L.trust_region(L.binary_divergence(), 0.2, 0.2, "predicted"),
            "take topk_divergence",
        ),
        (lambda: L.topk_divergence(tail="uniform"), "vocab=0 of topk_divergence"),
        (lambda: L.quadratic(0.0), "quadratic"),
        (lambda: L.saturate(up=0.0), "up=0.0 of saturate"),
        (lambda: L.mismatch_band(2.0, 1.0), "mismatch_band"),
        (lambda: L.mismatch_cap(0.5), "mismatch_cap"),
    ],
)
def test_thresholds_out_of_range_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_batch_without_top_k_says_what_to_fill():
    loss = L.chain(
        L.token_ratio("sampler"), L.trust_region(L.topk_divergence(), 0.1, 0.1), L.token_mean()
    )
    batch = batch_of(topk_ids=None)
    with pytest.raises(ValueError, match=r"topk_ids.*sampler's likeliest ids"):
        loss.prepare(batch, loss.init(batch))
