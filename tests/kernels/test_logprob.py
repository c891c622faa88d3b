"""Blockwise log-probs against a dense log-softmax (jax.nn.log_softmax on whole logits)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.kernels import logprob

M, D = 7, 16


def log_softmax(x, head, shape, temperature):
    z = x @ head.T
    if shape.softcap is not None:
        z = shape.softcap * jnp.tanh(z / shape.softcap)
    z = jnp.where(jnp.arange(len(head)) < shape.vocab_used, z, -1e30) / temperature
    return jax.nn.log_softmax(z)


def dense(x, head, targets, shape, temperature):
    logp = log_softmax(x, head, shape, temperature)
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(jnp.exp(logp) > 0, logp, 0.0), -1)
    return jnp.take_along_axis(logp, targets[:, None], 1)[:, 0], entropy


def case(V, used, spread=1.0):
    keys = jax.random.split(jax.random.key(V), 4)
    x = spread * jax.random.normal(keys[0], (M, D))
    head = jax.random.normal(keys[1], (V, D))
    targets = jax.random.randint(keys[2], (M,), 0, used)
    return x, head, targets, jax.random.normal(keys[3], (2, M))


# (vocabulary, used ids, block, shards, soft cap, scale of x): block - 1, block, block + 1 and a
# remainder (trl PR 5349), padded ids, a split vocabulary; 0.01 is flat, 20 is peaked.
CASES = [
    (31, 31, 32, 1, None, 1.0),
    (32, 32, 32, 1, None, 1.0),
    (33, 33, 32, 1, 5.0, 1.0),
    (100, 83, 32, 1, None, 20.0),
    (100, 100, 32, 1, None, 0.01),
    (96, 90, 32, 2, None, 1.0),
]


@pytest.mark.parametrize("V,used,block,shards,softcap,spread", CASES)
def test_equals_dense_log_softmax_in_value_and_gradient(V, used, block, shards, softcap, spread):
    x, head, targets, weights = case(V, used, spread)
    shape = logprob.HeadShape(used, block, shards, softcap, entropy_gradient=True)

    def total(fn):
        def f(x, head):
            return sum(jnp.sum(a * w) for a, w in zip(fn(x, head), weights, strict=True))

        return jax.jit(jax.value_and_grad(f, (0, 1)))

    ours = lambda x, head: logprob.token_logp(x, head, targets, shape, 0.7)  # noqa: E731
    theirs = lambda x, head: dense(x, head, targets, shape, 0.7)  # noqa: E731
    for a, b in zip(jax.jit(ours)(x, head), jax.jit(theirs)(x, head), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * max(spread, 1))
    ours_grad, theirs_grad = total(ours)(x, head)[1], total(theirs)(x, head)[1]
    for a, b in zip(ours_grad, theirs_grad, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(spread, 1))


@pytest.mark.parametrize("V,used,block,shards,softcap,spread", CASES)
def test_statistics_on_request_equal_dense_ones(V, used, block, shards, softcap, spread):
    x, head, targets, _ = case(V, used, spread)
    shape = logprob.HeadShape(used, block, shards, softcap, sum_squares=True)
    ids = jax.random.randint(jax.random.key(5), (M, 5), 0, used).at[:, 3].set(-1)
    out = jax.jit(lambda *a: logprob.token_statistics(*a, shape, 0.7, ids))(x, head, targets)
    logp = log_softmax(x, head, shape, 0.7)
    found = jnp.where(ids >= 0, jnp.take_along_axis(logp, jnp.maximum(ids, 0), 1), 0.0)
    np.testing.assert_allclose(out["topk_logp"], found, rtol=1e-4, atol=2e-5 * max(spread, 1))
    np.testing.assert_allclose(out["sum_squares"], jnp.exp(2 * logp).sum(-1), rtol=1e-4)
    total = lambda x: sum(jnp.sum(v) for n, v in statistics(x).items() if n != "logp")  # noqa: E731
    statistics = lambda x: logprob.token_statistics(x, head, targets, shape, 0.7, ids)  # noqa: E731
    assert np.abs(jax.grad(total)(x)).max() == 0.0


@pytest.mark.parametrize("V,used,block,shards,softcap,spread", CASES)
def test_divergences_and_their_directions_equal_dense_ones(V, used, block, shards, softcap, spread):
    x, head, targets, _ = case(V, used, spread)
    anchor = head + 0.1 * jax.random.normal(jax.random.key(9), head.shape)
    shape = logprob.HeadShape(used, block, shards, softcap)
    out = jax.jit(lambda *a: logprob.divergences(*a, targets, shape, 0.7))(x, head, x, anchor)
    logp, log_mu = log_softmax(x, head, shape, 0.7), log_softmax(x, anchor, shape, 0.7)
    logp, log_mu = (np.asarray(v, np.float64)[:, :used] for v in (logp, log_mu))
    logp, log_mu = (v - np.log(np.exp(v).sum(-1, keepdims=True)) for v in (logp, log_mu))
    mu, step = np.exp(log_mu), np.eye(used)[targets] - np.exp(logp)

    def moved(s):  # log pi after a step of size s along onehot(target) - pi
        z = logp + s * step
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    kl = lambda lp: (mu * (log_mu - lp)).sum(-1)  # noqa: E731
    tv = lambda lp: 0.5 * np.abs(mu - np.exp(lp)).sum(-1)  # noqa: E731
    for name, value, s in (("full_kl", kl, 1e-5), ("full_tv", tv, 1e-8)):
        np.testing.assert_allclose(out[name], value(logp), rtol=1e-3, atol=2e-6 * max(spread, 1))
        slope = (value(moved(s)) - value(moved(-s))) / (2 * s)  # central difference, float64
        np.testing.assert_allclose(out[f"{name}_dot"], slope, rtol=1e-3, atol=1e-5 * max(spread, 1))


def test_a_plain_loss_compiles_to_the_same_program_whatever_can_be_asked_for():
    x, head, targets, _ = case(40, 40)
    text = lambda fn: jax.jit(fn).lower(x, head, targets).as_text()  # noqa: E731
    shape = logprob.HeadShape(40, 16)
    plain = text(lambda *a: logprob.token_logp(*a, shape)[0])
    assert plain == text(lambda *a: logprob.token_statistics(*a, shape)["logp"])
    more = dataclasses.replace(shape, sum_squares=True)
    assert plain != text(lambda *a: logprob.token_statistics(*a, more)["sum_squares"])


def test_temperature_divides_logits_not_log_probs():
    # logits [2, 0] at T = 0.5: log softmax([4, 0])[0] = -0.0181 (verl-style fault gave -0.2539)
    x, head = jnp.ones((1, 1)), jnp.asarray([[2.0], [0.0]])
    logp, _ = logprob.token_logp(x, head, jnp.zeros(1, jnp.int32), logprob.HeadShape(2), 0.5)
    np.testing.assert_allclose(logp, -0.01815, atol=1e-5)


def test_entropy_carries_no_gradient_unless_asked():
    x, head, targets, _ = case(40, 40)
    f = lambda x: logprob.token_logp(x, head, targets, logprob.HeadShape(40, 16))[1].sum()  # noqa: E731
    assert np.abs(jax.grad(f)(x)).max() == 0.0


def test_peak_memory_is_below_the_logits():
    V, rows = 8192, 512
    shape = logprob.HeadShape(V, block=512)
    args = jnp.zeros((rows, D)), jnp.zeros((V, D)), jnp.zeros(rows, jnp.int32)
    f = jax.jit(jax.grad(lambda x, h, t: logprob.token_logp(x, h, t, shape)[0].sum(), (0, 1)))
    temporary = f.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporary < rows * V * 4 / 2
