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
      sum_squares: whether the sum of squared probabilities is computed.
    """

    vocab_used: int
    block: int = 4096
    shards: int = 1
    softcap: float | None = None
    products: str = "float32"
    entropy_gradient: bool = False
    sum_squares: bool = False


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


def _at_ids(z: Array, ids: Array, wanted: Array) -> Array:
    """Logits [M, shards, K] of the wanted ids [M, K] that this block holds, else 0.

    A column that an earlier block held is at LOWEST and does not count again.
    z: [M, shards, width]; ids: [shards, width], ascending by one in each row.
    """
    width = z.shape[-1]
    place = wanted[:, None, :] - ids[:, :1]  # [M, shards, K]
    found = jnp.take_along_axis(z, jnp.clip(place, 0, width - 1), -1)
    return jnp.where((place >= 0) & (place < width) & (found > LOWEST), found, 0.0)


def _forward(
    shape: HeadShape, x: Array, head: Array, targets: Array, scale: Array, topk_ids: Array | None
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """log-prob [M], entropy [M], log of the normaliser [M], and what else is asked for."""
    parts, width, count = _blocks(shape, head)
    M = x.shape[0]

    def body(carry: Any, i: Array) -> Any:
        top, total, weighted, hit, more = carry
        _, ids, z, _ = _logits(shape, x, parts, i, width, scale)
        new = jnp.maximum(top, z.max(-1))
        shrink, e = jnp.exp(top - new), jnp.exp(z - new[..., None])
        total = total * shrink + e.sum(-1)
        # As a product: XLA's CPU backend takes 10 times longer over the sum of e * z.
        weighted = weighted * shrink + jnp.einsum("msv,msv->ms", e, z, precision="highest")
        # Looked up, not compared with every id: one more sum over the block is 5 times slower here.
        hit = hit + _at_ids(z, ids, targets[:, None])[..., 0]
        after = {}
        if shape.sum_squares:
            after["sum_squares"] = more["sum_squares"] * shrink**2 + (e * e).sum(-1)
        if topk_ids is not None:
            after["topk"] = more["topk"] + _at_ids(z, ids, topk_ids)
        return (new, total, weighted, hit, after), None

    zero = jnp.zeros((M, shape.shards), jnp.float32)
    none = {"sum_squares": zero} if shape.sum_squares else {}
    if topk_ids is not None:
        none["topk"] = jnp.zeros((M, shape.shards, topk_ids.shape[1]), jnp.float32)
    (top, total, weighted, hit, more), _ = lax.scan(
        body, (jnp.full_like(zero, LOWEST), zero, zero, zero, none), jnp.arange(count)
    )
    most = top.max(-1)
    factor = jnp.exp(top - most[:, None])
    normaliser = (total * factor).sum(-1)
    log_z = most + jnp.log(normaliser)
    entropy = log_z - (weighted * factor).sum(-1) / normaliser
    out = {}
    if shape.sum_squares:
        out["sum_squares"] = (more["sum_squares"] * factor**2).sum(-1) / normaliser**2
    if topk_ids is not None:
        picked = more["topk"].sum(1) - log_z[:, None]
        out["topk_logp"] = jnp.where(topk_ids >= 0, picked, 0.0)
    return hit.sum(-1) - log_z, entropy, log_z, out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logp(
    shape: HeadShape, x: Array, head: Array, targets: Array, scale: Array, topk_ids: Array | None
) -> tuple[Array, Array, dict[str, Array]]:
    logp, entropy, _, more = _forward(shape, x, head, targets, scale, topk_ids)
    return logp, entropy, more


def _token_logp_fwd(
    shape: HeadShape, x: Array, head: Array, targets: Array, scale: Array, topk_ids: Array | None
) -> Any:
    logp, entropy, log_z, more = _forward(shape, x, head, targets, scale, topk_ids)
    return (logp, entropy, more), (x, head, targets, scale, log_z, entropy)


def _token_logp_bwd(shape: HeadShape, saved: Any, cotangent: tuple[Array, Array, Any]) -> Any:
    """d logp / d z_v = [v = target] - p_v;  d entropy / d z_v = -p_v (log p_v + entropy)."""
    x, head, targets, scale, log_z, entropy = saved
    g_logp, g_entropy, _ = cotangent
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
        # Written so that the transposed operand is x and not dz, which is larger.
        dw = _product(x, dz, ((0,), (0,)), shape.products).transpose(1, 2, 0)  # [shards, width, D]
        old = lax.dynamic_slice_in_dim(dhead, start, width, 1)
        return (dx, lax.dynamic_update_slice_in_dim(dhead, old + dw, start, 1)), None

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros(parts.shape, jnp.float32)
    (dx, dhead), _ = lax.scan(body, zeros, jnp.arange(count))
    return dx.astype(x.dtype), dhead.reshape(head.shape).astype(head.dtype), None, None, None


_token_logp.defvjp(_token_logp_fwd, _token_logp_bwd)


def token_statistics(
    x: Array,
    head: Array,
    targets: Array,
    shape: HeadShape,
    temperature: float | Array = 1.0,
    topk_ids: Array | None = None,
) -> dict[str, Array]:
    """Statistics of softmax(x @ head^T / temperature), each row's own; all float32.

    Args:
      x: [M, D] hidden states. head: [V, D]. targets: [M] int32 below `shape.vocab_used`.
      temperature: the sampler's, > 0; applied to logits (after the soft cap), never to log-probs.
      topk_ids: [M, K] int32, -1 = empty; None = not wanted.

    Returns:
      "logp" [M] of the targets and "entropy" [M] in nats (its gradient only with
      `shape.entropy_gradient`); without gradient "sum_squares" [M], the sum over the vocabulary of
      p^2, with `shape.sum_squares`, and with `topk_ids` "topk_logp" [M, K], 0 in empty slots.
    """
    scale = 1.0 / jnp.asarray(temperature, jnp.float32)
    out: Any = _token_logp(shape, x, head, targets, scale, topk_ids)  # custom_vjp hides the type
    logp, entropy, more = out
    if not shape.entropy_gradient:
        entropy = lax.stop_gradient(entropy)
    return {"logp": logp, "entropy": entropy, **lax.stop_gradient(more)}


def token_logp(
    x: Array, head: Array, targets: Array, shape: HeadShape, temperature: float | Array = 1.0
) -> tuple[Array, Array]:
    """`token_statistics`' log-prob [M] and entropy [M]."""
    out = token_statistics(x, head, targets, shape, temperature)
    return out["logp"], out["entropy"]


DEAD_BAND = 1e-7  # probabilities closer than this are equal where a sign is asked for


def divergences(
    x: Array,
    head: Array,
    anchor_x: Array,
    anchor_head: Array,
    targets: Array,
    shape: HeadShape,
    temperature: float | Array = 1.0,
) -> dict[str, Array]:
    """Divergences over the whole vocabulary from an anchor mu to pi, and how they would change.

    mu and pi are the softmax of (anchor_x, anchor_head) and of (x, head) at the temperature. "dot"
    is the derivative along one ascent step on log pi(target), z + s (onehot(target) - pi) at s = 0
    (Zhou et al., arXiv 2607.10848). With Q = sum pi^2, d pi_i = pi_i ([i = a] - pi_i - pi_a + Q).

    Costs four products with a head (normalisers first, then the sums), and no gradient.

    Returns:
      "full_kl" = KL(mu || pi) and "full_tv" = sum |mu - pi| / 2, both [M] in float32; "full_kl_dot"
      = pi_a - mu_a + sum pi (mu - pi); "full_tv_dot" = sum sign(pi - mu) d pi / 2.
    """
    x, head, anchor_x, anchor_head = lax.stop_gradient((x, head, anchor_x, anchor_head))
    scale = 1.0 / jnp.asarray(temperature, jnp.float32)
    plain = dataclasses.replace(shape, sum_squares=True)
    logp, _, log_z, more = _forward(plain, x, head, targets, scale, None)
    anchor_logp, _, anchor_log_z, _ = _forward(shape, anchor_x, anchor_head, targets, scale, None)
    parts, width, count = _blocks(shape, head)
    anchor_parts, _, _ = _blocks(shape, anchor_head)

    def sign(p: Array, mu: Array) -> Array:
        return jnp.where(jnp.abs(p - mu) > DEAD_BAND, jnp.sign(p - mu), 0.0)

    def body(sums: Any, i: Array) -> Any:
        z = _logits(shape, x, parts, i, width, scale)[2]
        w = _logits(shape, anchor_x, anchor_parts, i, width, scale)[2]
        log_p, log_mu = z - log_z[:, None, None], w - anchor_log_z[:, None, None]
        p, mu = jnp.exp(log_p), jnp.exp(log_mu)  # both 0 outside the vocabulary
        up = sign(p, mu)
        new = (
            jnp.where(mu > 0, mu * (log_mu - log_p), 0.0), jnp.abs(mu - p), p * (mu - p),
            up * p, up * p * p,
        )  # fmt: skip
        return tuple(s + n.sum(-1) for s, n in zip(sums, new)), None

    zero = jnp.zeros((x.shape[0], shape.shards), jnp.float32)
    sums, _ = lax.scan(body, (zero,) * 5, jnp.arange(count))
    kl, distance, pull, linear, square = (s.sum(-1) for s in sums)
    p, mu = jnp.exp(logp), jnp.exp(anchor_logp)
    tv_dot = 0.5 * (sign(p, mu) * p - square + (more["sum_squares"] - p) * linear)
    out = {
        "full_kl": jnp.maximum(kl, 0.0), "full_tv": 0.5 * distance,
        "full_kl_dot": p - mu + pull, "full_tv_dot": tv_dot,
    }  # fmt: skip
    return lax.stop_gradient(out)
