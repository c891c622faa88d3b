"""Surrogates: what is made of the ratio before it multiplies the advantage.

A clipped token gets the bound as a constant (not jnp.minimum, whose gradient at a tie is split).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, Terms, on_terms
from rljax.losses.ratio import ANCHORS, Anchor


def clip_ratio(low: float = 0.2, high: float = 0.2) -> LossTransform:
    """g = min(g, 1 + high) where A > 0, max(g, 1 - low) elsewhere.

    Equals min(r A, clip(r, 1 - low, 1 + high) A) / A of PPO (Schulman et al. 2017, arXiv
    1707.06347, equation 7); high > low is the clip-higher of DAPO (arXiv 2503.14476, section 3.1).
    Metric ratio/clipped: fraction of trained tokens whose gradient this removes.
    """
    if not 0.0 < low <= 1.0 or not 0.0 < high < math.inf:
        raise ValueError(
            f"clip_ratio(low={low}, high={high}) keeps the ratio in [1 - low, 1 + high]; "
            "low must lie in (0, 1] and high above 0, for instance 0.2 and 0.28"
        )

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.advantage is not None
        up = batch.advantage > 0
        dead = jnp.where(up, terms.g > 1.0 + high, terms.g < 1.0 - low)
        bound = jnp.where(up, 1.0 + high, 1.0 - low)
        clipped = (dead & (batch.advantage != 0)).astype(jnp.float32)
        terms = terms.replace(g=jnp.where(dead, bound, terms.g))
        return terms.measured("ratio/clipped", clipped, batch.mask)

    return on_terms(fn, needs=["ratio"], name="clip_ratio")


def dual_clip(limit: float = 3.0) -> LossTransform:
    """g = min(g, limit) where A < 0, so that one token with a huge ratio cannot dominate.

    Dual-clip PPO (Ye et al. 2020, arXiv 1912.09729, equation 8).
    """
    if not 1.0 < limit < math.inf:
        raise ValueError(f"dual_clip(limit={limit}) caps the ratio; limit must be above 1")

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.advantage is not None
        dead = (batch.advantage < 0) & (terms.g > limit)
        terms = terms.replace(g=jnp.where(dead, limit, terms.g))
        return terms.measured("ratio/dual_clipped", dead.astype(jnp.float32), batch.mask)

    return on_terms(fn, needs=["ratio"], name="dual_clip")


def score(low: float = 0.0, high: float = math.inf) -> LossTransform:
    """g = sg(clip(r, low, high)) log pi: the score form, which gives every token a gradient.

    CISPO (MiniMax-M1, 2025, arXiv 2506.13585, equation 4) with bounds on the ratio itself; without
    bounds it has the gradient of the plain ratio. Its value is not an objective.
    Metric ratio/clipped: fraction of trained tokens whose weight is a bound.
    """
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(
            f"score(low={low}, high={high}) bounds the ratio itself; 0 <= low <= 1 <= high, "
            "for instance low=0, high=5"
        )
    return _score("score", (low, high), (low, high))


def score_by_sign(
    positive: tuple[float, float] = (1.0, 1.0), negative: tuple[float, float] = (0.0, 1.0)
) -> LossTransform:
    """g = sg(clip(r, *bounds)) log pi with bounds `positive` where A >= 0, else `negative`.

    The defaults are TOPR's (Le Roux et al. 2025, arXiv 2503.14286): good tokens are imitated
    whatever their ratio, bad ones count less the less likely they have become.
    Metric ratio/clipped: fraction of trained tokens whose weight is a bound.
    """
    for label, (low, high) in (("positive", positive), ("negative", negative)):
        if not 0.0 <= low <= 1.0 <= high:
            raise ValueError(
                f"{label}={(low, high)} of score_by_sign bounds the ratio itself; "
                "0 <= low <= 1 <= high, for instance (0, 1)"
            )
    return _score("score_by_sign", positive, negative)


def quadratic(delta: float, scale: Anchor | None = None) -> LossTransform:
    """g = r - sign(A) q (r - 1)^2 / (2 delta): a penalty in place of a clip.

    The coefficient of grad log pi is A r w, w = 1 - sign(A (r - 1)) q |r - 1| / delta: 0 at the
    boundary q |r - 1| = delta of a diverging token, corrective beyond it.

    Args:
      delta: the radius, above 0. scale: None for q = 1, SPO (Xie et al. 2024, arXiv 2401.16025);
        an anchor for q = its probability of the token, DRPO (Yao et al. 2026, arXiv 2606.09821),
        whose radius is one of |pi - mu|. Take the anchor of the ratio.
    """
    if not 0.0 < delta < math.inf:
        raise ValueError(f"quadratic(delta={delta}); the radius must be above 0 and finite")
    if scale is not None and scale not in ANCHORS:
        raise ValueError(f"scale={scale!r} of quadratic; choose from {', '.join(ANCHORS)}, None")
    field = ANCHORS[scale] if scale else None

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.advantage is not None
        q = jnp.exp(getattr(batch, field)) if field else 1.0
        penalty = jnp.sign(batch.advantage) * q / (2.0 * delta) * (terms.g - 1.0) ** 2
        return terms.replace(g=terms.g - penalty)

    return on_terms(fn, needs=["ratio", field] if field else ["ratio"], name="quadratic")


def saturate(up: float = 1.0, down: float = 1.05) -> LossTransform:
    """g = 4 sigmoid(tau (r - 1)) / tau, tau = `up` where A > 0, else `down`: a soft gate.

    SAPO (Gao et al. 2025, arXiv 2511.20347); the gradient of log pi is r at r = 1 and fades on both
    sides, faster with a larger tau.
    """
    for label, tau in (("up", up), ("down", down)):
        if not 0.0 < tau < math.inf:
            raise ValueError(f"{label}={tau} of saturate; a temperature must be above 0 and finite")

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.advantage is not None
        tau = jnp.where(batch.advantage > 0, up, down)
        return terms.replace(g=4.0 / tau * jax.nn.sigmoid(tau * (terms.g - 1.0)))

    return on_terms(fn, needs=["ratio"], name="saturate")


def geometric_clip(low: float = 0.4, high: float = 0.4) -> LossTransform:
    """g = exp(mean over the sequence of log ratios), each <= high where A > 0, >= -low elsewhere.

    GMPO (Zhao et al. 2025, arXiv 2507.20673): tokens are clipped in log space, and the geometric
    mean carries the gradient of all its tokens. Put it after `token_ratio`, and end the chain with
    `sequence_mean_token_mean`.
    Metric ratio/clipped: fraction of trained tokens whose gradient the clip removes.
    """
    if not 0.0 < low < math.inf or not 0.0 < high < math.inf:
        raise ValueError(
            f"geometric_clip(low={low}, high={high}) keeps the log ratio in [-low, high]; "
            "both must be above 0 and finite"
        )

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.advantage is not None
        up, x = batch.advantage > 0, terms.log_ratio
        dead = jnp.where(up, x > high, x < -low)
        x = jnp.where(dead, jnp.where(up, high, -low), x) * batch.mask
        tokens = jnp.sum(batch.mask, axis=1, keepdims=True)
        pooled = jnp.sum(x, axis=1, keepdims=True) / jnp.maximum(tokens, 1.0)
        pooled = jnp.broadcast_to(pooled, x.shape)
        clipped = (dead & (batch.advantage != 0)).astype(jnp.float32)
        terms = terms.replace(log_ratio=pooled, g=jnp.exp(pooled))
        return terms.measured("ratio/clipped", clipped, batch.mask)

    return on_terms(fn, needs=["ratio"], name="geometric_clip")


def _score(
    name: str, positive: tuple[float, float], negative: tuple[float, float]
) -> LossTransform:
    """g = sg(clip(r, bounds by the sign of A)) log pi."""

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.advantage is not None
        good, ratio = batch.advantage >= 0, jax.lax.stop_gradient(terms.g)
        low = jnp.where(good, positive[0], negative[0])
        high = jnp.where(good, positive[1], negative[1])
        clipped = ((ratio < low) | (ratio > high)).astype(jnp.float32)
        terms = terms.replace(g=jnp.clip(ratio, low, high) * terms.logp)
        return terms.measured("ratio/clipped", clipped, batch.mask)

    return on_terms(fn, needs=["ratio"], name=name)
