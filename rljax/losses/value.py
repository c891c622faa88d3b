"""Losses of a critic: squared, clipped or Huber distance of its live values from their targets.

A critic learns by a chain of its own, `chain(value_squared(), token_mean())`, or beside the policy
in one chain; either way the targets are those that a returns member wrote.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, Terms, on_terms
from rljax.types import Array


def bounded(raw: Array, low: float, high: float) -> Array:
    """V = low + (high - low) (1/2 + atan(raw) / pi): a value that cannot leave (low, high).

    BPCO, arXiv 2608.23566, equation 9. Its slope falls as 1 / raw^2, where a sigmoid's falls
    exponentially, so a saturated critic still learns.
    """
    return low + (high - low) * (0.5 + jnp.arctan(raw) / math.pi)


def value_squared(clip: float | None = None, coefficient: float = 1.0) -> LossTransform:
    """extra += coefficient / 2 * max((V - y)^2, (V_old + clip(V - V_old, -c, c) - y)^2).

    Without `clip` the first square alone. With it a value that has moved by more than c towards its
    target has no gradient, as in the reference code of PPO (openai/baselines, ppo2).
    Metrics value/loss and value/mean; with clip also value/clipped.
    """
    if clip is not None:
        _check_positive("value_squared", "clip", clip)
    _check_positive("value_squared", "coefficient", coefficient)

    def fn(terms: Terms, batch: Batch) -> Terms:
        value, target = terms.live["value_live"], batch.value_target
        assert target is not None
        square = (value - target) ** 2
        if clip is not None:
            assert batch.value is not None
            near = batch.value + jnp.clip(value - batch.value, -clip, clip)
            bound = jax.lax.stop_gradient((near - target) ** 2)
            dead = bound > square
            square = jnp.where(dead, bound, square)
            terms = terms.measured("value/clipped", dead.astype(jnp.float32), batch.mask)
        return _add(terms, batch, 0.5 * square, coefficient)

    needs = ["value_live", "value_target", *(["value"] if clip is not None else [])]
    return on_terms(fn, needs=needs, name="value_squared")


def value_huber(delta: float = 1.0, coefficient: float = 1.0) -> LossTransform:
    """extra += coefficient * huber(V - y): squared / 2 up to `delta`, linear beyond.

    Huber 1964, Annals of Mathematical Statistics 35. Metrics value/loss and value/mean.
    """
    _check_positive("value_huber", "delta", delta)
    _check_positive("value_huber", "coefficient", coefficient)

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.value_target is not None
        distance = jnp.abs(terms.live["value_live"] - batch.value_target)
        inside = jnp.minimum(distance, delta)
        return _add(terms, batch, inside * (distance - 0.5 * inside), coefficient)

    return on_terms(fn, needs=["value_live", "value_target"], name="value_huber")


def _add(terms: Terms, batch: Batch, loss: Array, coefficient: float) -> Terms:
    terms = terms.replace(extra=terms.extra + coefficient * loss)
    terms = terms.measured("value/loss", loss, batch.mask)
    return terms.measured("value/mean", terms.live["value_live"], batch.mask)


def _check_positive(member: str, name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name}={value} of {member}; it must be positive and finite")
