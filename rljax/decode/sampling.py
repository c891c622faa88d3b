"""Draws the next token: temperature, top-k, top-p, min-p; one hash a row.

By inverse CDF in two levels, a block of the vocabulary and then a token of it, instead of a random
number and a logarithm a logit (`jax.random.categorical`). Limits are found by bisection instead of
a sort. CPU time on XLA's CPU backend for 32 rows of 49,152 logits: 4 ms to draw, 35 to 42 ms for a
limit; a sort takes 500 ms, and the 135M-parameter model around it about 200.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rljax.types import Array, Record

LOWEST = -1e30


class Sampling(Record):
    """Distribution of each row. All [B].

    Attributes:
      temperature: float32, 0 = greedy.
      top_k: int32, 0 = off. top_p, min_p: float32, 1 and 0 = off. They apply in this order to the
        distribution at the temperature, as in Hugging Face transformers; ties at a limit stay in.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array


def uniform(seed: Array, sample: Array, index: Array) -> Array:
    """[B, 2] float32 in [0, 1): a function of request seed, sample number and token index alone."""

    def one(seed: Array, sample: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), index)
        return jax.random.uniform(key, (2,))

    return jax.vmap(one)(seed, sample, index)


def _ordered(z: Array) -> Array:
    """uint32 with the order of the float32 values."""
    bits = lax.bitcast_convert_type(z, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[Array], Array], rows: int) -> Array:
    """Largest uint32 x [rows] with holds(x) [rows]: true up to some x, false above."""

    def body(i: Array, x: Array) -> Array:
        tried = x | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(tried), tried, x)

    return lax.fori_loop(0, 32, body, jnp.zeros(rows, jnp.uint32))


def _limits(z: Array, s: Sampling) -> Array:
    """Least logit [B] that the filters keep, of logits [B, V] at the temperature.

    top-k: the largest x with at least k logits >= x. top-p: the largest x such that the tokens >= x
    hold mass p. Both by deciding the 32 bits of x one after the other, which is exact.
    """
    B, V = z.shape
    order, top = _ordered(z), jnp.max(z, -1)

    def by_count() -> Array:
        k = jnp.where(s.top_k > 0, s.top_k, V)
        return _largest(lambda x: jnp.sum(order >= x[:, None], -1) >= k, B)

    none = jnp.zeros(B, jnp.uint32)
    least = lax.cond(jnp.any(s.top_k > 0), by_count, lambda: none)

    def by_mass() -> Array:
        p = jnp.where(order >= least[:, None], jnp.exp(z - top[:, None]), 0.0)
        wanted = s.top_p * jnp.sum(p, -1)
        found = _largest(lambda x: jnp.sum(jnp.where(order >= x[:, None], p, 0.0), -1) >= wanted, B)
        return jnp.where(s.top_p < 1.0, jnp.maximum(found, least), least)

    least = lax.cond(jnp.any(s.top_p < 1.0), by_mass, lambda: least)
    # p >= min_p * max p
    by_ratio = jnp.where(s.min_p > 0.0, top + jnp.log(jnp.maximum(s.min_p, 1e-30)), LOWEST)
    least = jnp.maximum(least, _ordered(by_ratio))
    return jnp.min(jnp.where(order >= least[:, None], z, top[:, None]), -1)


def _pick(mass: Array, u: Array) -> tuple[Array, Array]:
    """Index [B] drawn in proportion to mass [B, n] with u [B], and the total mass [B].

    The running sum is a product with a triangle of ones (XLA's CPU backend unrolls `cumsum` into
    many small loops). What has no mass is never drawn, whatever the rounding of the sum.
    """
    n = mass.shape[1]
    cdf = jnp.dot(mass, jnp.triu(jnp.ones((n, n), mass.dtype)), precision=lax.Precision.HIGHEST)
    passed = (cdf > (u * cdf[:, -1])[:, None]) & (mass > 0)
    index = jnp.where(jnp.any(passed, -1), jnp.argmax(passed, -1), jnp.argmax(mass, -1))
    return index, cdf[:, -1]


def _draw(z: Array, least: Array, u: Array) -> tuple[Array, Array]:
    """Inverse-CDF draw from softmax(z) [B, V] over z >= least [B], with u [B, 2].

    Returns token [B] and its log-prob [B].
    """
    B, V = z.shape
    block = 1 << max(V - 1, 1).bit_length() // 2  # both levels about sqrt(V)
    z = jnp.pad(z, ((0, 0), (0, -V % block)), constant_values=LOWEST).reshape(B, -1, block)
    top = jnp.max(z, (1, 2))

    def mass(z: Array) -> Array:
        over = (slice(None),) + (None,) * (z.ndim - 1)
        return jnp.where(z >= least[over], jnp.exp(z - top[over]), 0.0)

    j, total = _pick(mass(z).sum(-1), u[:, 0])
    chosen = jnp.take_along_axis(z, j[:, None, None], 1)[:, 0]  # [B, block]
    i, _ = _pick(mass(chosen), u[:, 1])
    logp = jnp.take_along_axis(chosen, i[:, None], -1)[:, 0] - top - jnp.log(total)
    return j * block + i, logp


def sample(
    logits: Array, u: Array, s: Sampling, allowed: Array | None = None
) -> tuple[Array, Array, Array]:
    """Draws a token a row.

    Args:
      logits: [B, V] float32; ids that are in no softmax at -1e30 or below.
      u: [B, 2] float32 in [0, 1).
      allowed: [V] bool, ids that may be drawn; None = all. The others stay in the full softmax.

    Returns:
      token [B] int32; its log-prob [B] under the distribution drawn from (0 where greedy); its
      log-prob [B] under the full softmax at temperature 1.
    """
    logits = jnp.maximum(logits, LOWEST)
    greedy = s.temperature == 0.0
    temperature = jnp.where(greedy, 1.0, s.temperature)
    z = logits / temperature[:, None]
    if allowed is not None:
        z = jnp.where(allowed, z, LOWEST)
    filters = jnp.any((s.top_k > 0) | (s.top_p < 1.0) | (s.min_p > 0.0))
    # The limits leave the conditional, not the filtered logits: those would be a copy of [B, V].
    everything = jnp.full(z.shape[0], LOWEST / 2)
    least = lax.cond(filters, lambda z: _limits(z, s), lambda _: everything, z)
    token, logp = _draw(z, least, u)
    best = lax.cond(
        jnp.any(greedy), lambda z: jnp.argmax(z, -1), lambda _: jnp.zeros_like(token), z
    )
    token = jnp.where(greedy, best, token).astype(jnp.int32)

    def full(token: Array) -> Array:
        picked = jnp.take_along_axis(logits, token[:, None], -1)[:, 0]
        return picked - jax.nn.logsumexp(logits, -1)

    if allowed is None:
        same = jnp.all(s.temperature == 1.0) & ~filters
        logp_full = lax.cond(same, lambda _: logp, full, token)
    else:
        logp_full = full(token)
    return token, jnp.where(greedy, 0.0, logp), logp_full


def likeliest(
    logits: Array, s: Sampling, count: int, allowed: Array | None = None
) -> tuple[Array, Array]:
    """The likeliest tokens of the distribution that `sample` draws from, by descending log-prob.

    Returns:
      ids [B, count] int32 and their log-probs [B, count]; -1 and 0 past the tokens that the filters
      leave (one where greedy).
    """
    V = logits.shape[-1]
    logits = jnp.maximum(logits, LOWEST)
    greedy = s.temperature == 0.0
    z = logits / jnp.where(greedy, 1.0, s.temperature)[:, None]
    if allowed is not None:
        z = jnp.where(allowed, z, LOWEST)
    least = jnp.maximum(_limits(z, s), LOWEST / 2)
    z = jnp.where(z >= least[:, None], z, -jnp.inf)
    found, ids = lax.top_k(z, min(count, V))
    logp = found - jax.nn.logsumexp(z, -1, keepdims=True)
    first = jnp.arange(min(count, V)) == 0
    logp = jnp.where(greedy[:, None], jnp.where(first, 0.0, -jnp.inf), logp)
    kept = jnp.isfinite(logp)
    room = ((0, 0), (0, max(count - V, 0)))
    ids = jnp.pad(jnp.where(kept, ids, -1), room, constant_values=-1)
    return ids.astype(jnp.int32), jnp.pad(jnp.where(kept, logp, 0.0), room)
