"""Surrogates: what is made of the ratio before it multiplies the advantage.

A clipped token gets the bound as a constant (not jnp.minimum, whose gradient at a tie is split).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, Terms, on_terms


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

    def fn(terms: Terms, batch: Batch) -> Terms:
        ratio = jax.lax.stop_gradient(terms.g)
        clipped = ((ratio < low) | (ratio > high)).astype(jnp.float32)
        terms = terms.replace(g=jnp.clip(ratio, low, high) * terms.logp)
        return terms.measured("ratio/clipped", clipped, batch.mask)

    return on_terms(fn, needs=["ratio"], name="score")
