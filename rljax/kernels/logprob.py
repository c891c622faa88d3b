"""Log-probability and entropy of given tokens, computed over blocks of the vocabulary.

[M, V] logits never exist at once: the forward pass keeps a running maximum and sums, the backward
pass recomputes each block (four products with the head in all, where kept logits would take three).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rljax.types import Array

LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Static description of a language-model head.

    Attributes:
      vocab_used: ids from this on are padding, in no softmax.
      block: vocabulary columns held at once.
      shards: over how many devices the vocabulary is split; blocks are cut inside each shard.
      softcap: cap * tanh(z / cap) on logits (Gemma 2).
      products: dtype of the operands of the products; results are float32.
      entropy_gradient: whether the entropy is differentiated.
    """

    vocab_used: int
    block: int = 4096
    shards: int = 1
    softcap: float | None = None
    products: str = "float32"
    entropy_gradient: bool = False


def _product(a: Array, b: Array, dims: Any, dtype: str) -> Array:
    precision = lax.Precision.HIGHEST if dtype == "float32" else None
    return lax.dot_general(
        a.astype(dtype), b.astype(dtype), (dims, ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip


def _blocks(shape: HeadShape, head: Array) -> tuple[Array, int, int]:
    """Head as [shards, V / shards, D], the block width and the number of blocks a shard."""
    V, D = head.shape
    per = V // shape.shards
    width = min(shape.block, per)
    return head.reshape(shape.shards, per, D), width, -(-per // width)


def _logits(
    shape: HeadShape, x: Array, head: Array, i: Array, width: int, scale: Array
) -> tuple[Array, Array, Array, Array]:
    """Block i: first column, ids [shards, width], scaled logits [M, shards, width], their slope.

    The last block is moved left to stay inside; columns that an earlier block held, and ids past
    the used vocabulary, come out at LOWEST.
    """
    per = head.shape[1]
    start = jnp.minimum(i * width, per - width)
    weights = lax.dynamic_slice_in_dim(head, start, width, 1)
    z = _product(x, weights, ((1,), (2,)), shape.products)  # [M, shards, width]
    slope = scale
    if shape.softcap is not None:
        t = jnp.tanh(z / shape.softcap)
        z, slope = shape.softcap * t, scale * (1 - t * t)
    column = start + jnp.arange(width)
    ids = jnp.arange(shape.shards)[:, None] * per + column
    live = (column >= i * width) & (ids < shape.vocab_used)
    return start, ids, jnp.where(live, z * scale, LOWEST), slope


def _forward(
    shape: HeadShape, x: Array, head: Array, targets: Array, scale: Array
) -> tuple[Array, Array, Array]:
    """log-prob [M], entropy [M] and log of the normaliser [M]."""
    parts, width, count = _blocks(shape, head)
    M = x.shape[0]

    def body(carry: Any, i: Array) -> Any:
        top, total, weighted, hit = carry
        _, ids, z, _ = _logits(shape, x, parts, i, width, scale)
        new = jnp.maximum(top, z.max(-1))
        shrink, e = jnp.exp(top - new), jnp.exp(z - new[..., None])
        total = total * shrink + e.sum(-1)
        weighted = weighted * shrink + (e * z).sum(-1)
        here = (ids == targets[:, None, None]) & (z > LOWEST)  # a repeated column counts once
        hit = hit + jnp.where(here, z, 0.0).sum(-1)
        return (new, total, weighted, hit), None

    zero = jnp.zeros((M, shape.shards), jnp.float32)
    (top, total, weighted, hit), _ = lax.scan(
        body, (jnp.full_like(zero, LOWEST), zero, zero, zero), jnp.arange(count)
    )
    most = top.max(-1)
    factor = jnp.exp(top - most[:, None])
    normaliser = (total * factor).sum(-1)
    log_z = most + jnp.log(normaliser)
    entropy = log_z - (weighted * factor).sum(-1) / normaliser
    return hit.sum(-1) - log_z, entropy, log_z


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logp(
    shape: HeadShape, x: Array, head: Array, targets: Array, scale: Array
) -> tuple[Array, Array]:
    logp, entropy, _ = _forward(shape, x, head, targets, scale)
    return logp, entropy


def _token_logp_fwd(shape: HeadShape, x: Array, head: Array, targets: Array, scale: Array) -> Any:
    logp, entropy, log_z = _forward(shape, x, head, targets, scale)
    return (logp, entropy), (x, head, targets, scale, log_z, entropy)


def _token_logp_bwd(shape: HeadShape, saved: Any, cotangent: tuple[Array, Array]) -> Any:
    """d logp / d z_v = [v = target] - p_v;  d entropy / d z_v = -p_v (log p_v + entropy)."""
    x, head, targets, scale, log_z, entropy = saved
    g_logp, g_entropy = cotangent
    parts, width, count = _blocks(shape, head)

    def body(carry: Any, i: Array) -> Any:
        dx, dhead = carry
        start, ids, z, slope = _logits(shape, x, parts, i, width, scale)
        logp = z - log_z[:, None, None]
        p = jnp.exp(logp)
        dz = g_logp[:, None, None] * ((ids == targets[:, None, None]) - p)
        if shape.entropy_gradient:
            dz -= (
                g_entropy[:, None, None] * p * jnp.where(p > 0, logp + entropy[:, None, None], 0.0)
            )
        dz = jnp.where(z > LOWEST, dz * slope, 0.0)
        weights = lax.dynamic_slice_in_dim(parts, start, width, 1)
        dx += _product(dz, weights, ((1, 2), (0, 1)), shape.products)
        dw = _product(dz, x, ((0,), (0,)), shape.products)  # [shards, width, D]
        old = lax.dynamic_slice_in_dim(dhead, start, width, 1)
        return (dx, lax.dynamic_update_slice_in_dim(dhead, old + dw, start, 1)), None

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros(parts.shape, jnp.float32)
    (dx, dhead), _ = lax.scan(body, zeros, jnp.arange(count))
    return dx.astype(x.dtype), dhead.reshape(head.shape).astype(head.dtype), None, None


_token_logp.defvjp(_token_logp_fwd, _token_logp_bwd)


def token_logp(
    x: Array, head: Array, targets: Array, shape: HeadShape, temperature: float | Array = 1.0
) -> tuple[Array, Array]:
    """log softmax(x @ head^T / temperature) at `targets`, and the entropy of that distribution.

    Args:
      x: [M, D] hidden states. head: [V, D]. targets: [M] int32 below `shape.vocab_used`.
      temperature: the sampler's, > 0; applied to logits (after the soft cap), never to log-probs.

    Returns:
      (log-prob [M], entropy [M] in nats), float32. The entropy carries a gradient only with
      `shape.entropy_gradient`.
    """
    scale = 1.0 / jnp.asarray(temperature, jnp.float32)
    out: Any = _token_logp(shape, x, head, targets, scale)  # custom_vjp hides the type
    logp, entropy = out
    return logp, entropy if shape.entropy_gradient else lax.stop_gradient(entropy)
