"""Regularisers: KL to the reference by its sampled estimators, entropy bonus, log-ratio penalty.

With d = log pi - log ref on tokens sampled from pi, the estimators of KL(pi || ref) (Schulman 2020,
joschu.net/blog/kl-approx.html) and what their gradient is on average when used as a loss:

    k1 = d                    mean gradient 0: value only, useless as a penalty
    k2 = d^2 / 2              gradient of KL(pi || ref), exact; its value is biased
    k3 = exp(-d) + d - 1      gradient of KL(ref || pi); its value is unbiased and never negative
    k1+, k3+                  value as named, gradient of k2
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, Terms, on_terms
from rljax.losses.ratio import ANCHORS, Anchor
from rljax.types import Array

Kind = Literal["k1", "k2", "k3", "k1+", "k2+", "k3+"]
KINDS = ("k1", "k2", "k3", "k1+", "k2+", "k3+")


def kl_estimate(log_ratio: Array, kind: Kind = "k3") -> Array:
    """Per-token estimate of KL(pi || ref) from d = log pi - log ref; see the module's table.

    exp(-d) is clamped at |d| = 20 against overflow; verl's clamp of the value at 10 is left out.
    """
    d = log_ratio
    half = 0.5 * d**2
    base = kind.rstrip("+")
    value = d if base == "k1" else half if base == "k2" else jnp.expm1(jnp.clip(-d, -20, 20)) + d
    if kind.endswith("+"):
        value = jax.lax.stop_gradient(value - half) + half
    return value


def kl_to_reference(
    coefficient: float, kind: Kind = "k3", importance: bool = False
) -> LossTransform:
    """extra += coefficient * k(log pi - log ref).

    It acts on every trained token, those with advantage 0 included; `drop_flat_groups` takes flat
    groups out of it. Metric kl/reference, nats per token, by the same estimator.

    Args:
      coefficient: >= 0; 0 only measures.
      kind: the estimator; GRPO uses k3 (arXiv 2402.03300, equation 4).
      importance: weigh each token by sg(ratio), so that several updates on one batch still estimate
        the KL of the current policy; needs a token ratio before it.
    """
    _check_coefficient("kl_to_reference", coefficient)
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} of kl_to_reference; choose from {', '.join(KINDS)}")

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.logp_ref is not None
        kl = kl_estimate(terms.logp - batch.logp_ref, kind)
        if importance:
            kl = jax.lax.stop_gradient(jnp.exp(terms.log_ratio)) * kl
        terms = terms.replace(extra=terms.extra + coefficient * kl)
        return terms.measured("kl/reference", kl, batch.mask)

    needs = ["logp_ref", "ratio"] if importance else ["logp_ref"]
    return on_terms(fn, needs=needs, name="kl_to_reference")


def entropy_bonus(coefficient: float) -> LossTransform:
    """extra -= coefficient * H, the entropy of the next-token distribution, from the model's head.

    Metric entropy, nats per token.

    Args:
      coefficient: >= 0; 0 only measures.
    """
    _check_coefficient("entropy_bonus", coefficient)

    def fn(terms: Terms, batch: Batch) -> Terms:
        entropy = terms.live["entropy"]
        terms = terms.replace(extra=terms.extra - coefficient * entropy)
        return terms.measured("entropy", entropy, batch.mask)

    return on_terms(fn, needs=["entropy"], name="entropy_bonus")


def log_ratio_penalty(coefficient: float, anchor: Anchor = "sampler") -> LossTransform:
    """extra += coefficient / 2 * (log pi - log anchor)^2 per token, any ratio apart.

    DRO (Richemond et al. 2024, arXiv 2405.19107) squares the log ratio of the whole response; per
    token it is a step of k2. Metric log_ratio/square, mean (log pi - log anchor)^2.

    Args:
      coefficient: >= 0; 0 only measures.
    """
    _check_coefficient("log_ratio_penalty", coefficient)
    if anchor not in ANCHORS:
        raise ValueError(
            f"anchor={anchor!r} of log_ratio_penalty; choose from {', '.join(ANCHORS)}"
        )
    field = ANCHORS[anchor]

    def fn(terms: Terms, batch: Batch) -> Terms:
        square = (terms.logp - getattr(batch, field)) ** 2
        terms = terms.replace(extra=terms.extra + 0.5 * coefficient * square)
        return terms.measured("log_ratio/square", square, batch.mask)

    return on_terms(fn, needs=[field], name="log_ratio_penalty")


def _check_coefficient(name: str, value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name}(coefficient={value}); it must be at least 0 and finite")
