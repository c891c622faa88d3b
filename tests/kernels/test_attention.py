"""Attention against plain loops over queries and keys, in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.kernels import attention

N, K, H = 4, 2, 3


def one_sequence(q, k, v, scale, softcap, window):
    """[S, N, H] attention of one sequence, a loop from the definition."""
    S = len(q)
    out = np.zeros((S, N, H))
    for i in range(S):
        for n in range(N):
            head = n // (N // K)
            first = 0 if window is None else max(0, i - window + 1)
            scores = np.array([q[i, n] @ k[j, head] * scale for j in range(first, i + 1)])
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[i, n] = weights / weights.sum() @ v[first : i + 1, head]
    return out


def arrays(B, S):
    keys = jax.random.split(jax.random.key(S), 3)
    heads = (N, K, K)
    return [jax.random.normal(k, (B, S, n, H)) for k, n in zip(keys, heads, strict=True)]


OPTIONS = [{}, {"softcap": 1.5}, {"window": 3}]


@pytest.mark.parametrize("options", OPTIONS)
def test_causal_equals_the_definition(options):
    q, k, v = arrays(2, 6)
    out = attention.causal(q, k, v, scale=0.7, **options)
    full = {"softcap": None, "window": None, **options}
    for b in range(2):
        expected = one_sequence(*(np.asarray(x[b], np.float64) for x in (q, k, v)), 0.7, **full)
        np.testing.assert_allclose(out[b], expected, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_grouped_rows_equal_separate_sequences(options):
    P, G, T = 5, 3, 4
    q, k, v = arrays(2, P + G * T)
    length = jnp.asarray([5, 2])
    out = attention.grouped(
        q, k, v, length, responses=G, prompt_columns=P, scale=0.7, **options
    )  # fmt: skip
    full = {"softcap": None, "window": None, **options}
    for b, n in enumerate([5, 2]):
        for g in range(G):
            columns = [*range(n), *range(P + g * T, P + (g + 1) * T)]
            alone = [np.asarray(x[b], np.float64)[columns] for x in (q, k, v)]
            expected = one_sequence(*alone, 0.7, **full)
            np.testing.assert_allclose(out[b][jnp.asarray(columns[n:])], expected[n:], atol=1e-5)
            np.testing.assert_allclose(out[b][:n], expected[:n], atol=1e-5)


def test_gradient_of_what_padding_holds_is_zero():
    P, G, T = 5, 2, 3
    q, k, v = arrays(1, P + G * T)

    def real(k):
        out = attention.grouped(
            q, k, v, jnp.asarray([3]), responses=G, prompt_columns=P, scale=1.0
        )  # fmt: skip
        return (out[:, :3] ** 2).sum() + (out[:, P:] ** 2).sum()

    gradient = jax.grad(real)(k)
    assert np.abs(gradient[:, 3:P]).max() == 0.0
    assert np.abs(gradient[:, :3]).max() > 0.0
