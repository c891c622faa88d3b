"""Importance ratios pi / anchor: of a token, of a whole sequence, or its geometric mean per token;
and corrections for a sampler whose probabilities are not the trainer's, weights of old / sampler.

Every ratio is clamped in log space; outside the clamp its gradient is 0, which also keeps float32
free of inf * 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, Terms, on_terms
from rljax.types import Array

Anchor = Literal["old", "sampler", "reference"]
Level = Literal["token", "sequence"]
ANCHORS = {"old": "logp_old", "sampler": "logp_sampler", "reference": "logp_ref"}


def token_ratio(anchor: Anchor = "old", clamp: float = 20.0) -> LossTransform:
    """g = r_t = exp(logp_t - anchor_t).

    PPO (Schulman et al. 2017, arXiv 1707.06347, equation 6).

    Args:
      anchor: "old" (the trainer's log-probs before the update), "sampler" (what the decode engine
        recorded) or "reference".
      clamp: largest |log ratio|.
    """
    return _ratio("token_ratio", anchor, clamp, lambda log_ratio, mask: log_ratio)


def sequence_ratio(anchor: Anchor = "old", clamp: float = 20.0) -> LossTransform:
    """g = s exp(logp_t - sg(logp_t)), s = sg(product over the sequence of the token ratios).

    Value s at each token, gradient s grad log pi_t: summed over the tokens that is the gradient of
    s itself. A thousand tokens of log ratio 0.001 make e; `geometric_ratio` makes 1.001 of them.
    """
    return _ratio("sequence_ratio", anchor, clamp, lambda log_ratio, mask: _total(log_ratio))


def geometric_ratio(anchor: Anchor = "old", clamp: float = 20.0) -> LossTransform:
    """g = s exp(logp_t - sg(logp_t)), s = sg(exp(mean over the sequence of the log ratios)).

    GSPO, token form (Zheng et al. 2025, arXiv 2507.18071, equation 14): with the same advantage on
    all tokens of a sequence its gradient is that of the sequence form.
    """

    def pool(log_ratio: Array, mask: Array) -> Array:
        return _total(log_ratio) / jnp.maximum(_total(mask), 1.0)

    return _ratio("geometric_ratio", anchor, clamp, pool)


def mismatch_cap(cap: float = 2.0, level: Level = "token") -> LossTransform:
    """weight *= min(rho, cap), rho = old / sampler: truncated importance sampling (TIS).

    The ratio of the chain is against "old"; this restores the factor between the trainer before the
    update and the decode engine. Yao et al. 2025, fengyao.notion.site/off-policy-rl.
    Metrics: mismatch/weight, mean; mismatch/corrected, fraction of trained tokens capped.

    Args:
      level: "token", or "sequence" for the product over the sequence.
    """
    if not 1.0 <= cap < math.inf:
        raise ValueError(f"mismatch_cap(cap={cap}); the cap must be at least 1 and finite")
    return _correction("mismatch_cap", level, lambda rho: (jnp.minimum(rho, cap), rho > cap))


def mismatch_band(low: float = 0.5, high: float = 5.0, level: Level = "token") -> LossTransform:
    """weight *= rho where low <= rho <= high, else 0, rho = old / sampler.

    IcePop (Ling team 2025, arXiv 2510.18855) has these defaults; low=0 with level="sequence" is
    masked importance sampling (MIS; compared in arXiv 2510.26788).
    Metrics: mismatch/weight, mean; mismatch/corrected, fraction of trained tokens dropped.

    Args:
      level: "token", or "sequence" for the product over the sequence.
    """
    if not 0.0 <= low <= 1.0 <= high < math.inf:
        raise ValueError(
            f"mismatch_band(low={low}, high={high}); 0 <= low <= 1 <= high, and high finite"
        )

    def weigh(rho: Array) -> tuple[Array, Array]:
        outside = (rho < low) | (rho > high)
        return jnp.where(outside, 0.0, rho), outside

    return _correction("mismatch_band", level, weigh)


def _correction(
    name: str, level: str, weigh: Callable[[Array], tuple[Array, Array]]
) -> LossTransform:
    """weight *= the first of weigh(rho); the second says where rho was not taken as it is."""
    if level not in ("token", "sequence"):
        raise ValueError(f'level={level!r} of {name}; it is "token" or "sequence"')

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.logp_old is not None and batch.logp_sampler is not None
        gap = batch.logp_old - batch.logp_sampler
        gap = jnp.broadcast_to(_total(gap), gap.shape) if level == "sequence" else gap
        weight, changed = weigh(jnp.exp(jnp.clip(gap, -20.0, 20.0)))
        terms = terms.replace(weight=terms.weight * weight)
        terms = terms.measured("mismatch/weight", weight, batch.mask)
        return terms.measured("mismatch/corrected", changed.astype(jnp.float32), batch.mask)

    return on_terms(fn, needs=["logp_old", "logp_sampler"], name=name)


def _total(x: Array) -> Array:
    """Sum over each sequence, [B, 1]; masked entries are 0 by then."""
    return jnp.sum(x, axis=1, keepdims=True)


def _ratio(name: str, anchor: str, clamp: float, pool) -> LossTransform:
    """Ratio whose value is exp(pool(log ratio)) and whose gradient is value * grad logp_t."""
    if anchor not in ANCHORS:
        raise ValueError(f"anchor={anchor!r} of {name}; choose from {', '.join(ANCHORS)}")
    if not 0.0 < clamp <= 80.0:
        raise ValueError(f"clamp={clamp} of {name}; it must lie in (0, 80], where exp is finite")
    field = ANCHORS[anchor]

    def fn(terms: Terms, batch: Batch) -> Terms:
        log_ratio = terms.logp - getattr(batch, field)
        pooled = jax.lax.stop_gradient(pool(log_ratio, batch.mask))
        log_ratio = pooled + (terms.logp - jax.lax.stop_gradient(terms.logp))
        log_ratio = jnp.clip(log_ratio, -clamp, clamp)
        ratio = jnp.exp(log_ratio)
        terms = terms.replace(log_ratio=log_ratio, g=ratio)
        return terms.measured("ratio/mean", ratio, batch.mask)

    return on_terms(fn, needs=[field], gives=["ratio"], name=name)
