"""Trust regions: tokens on which the policy has gone too far lose their gradient.

A region is a divergence D of the policy pi from the distribution mu that the tokens were drawn
from, a threshold, and a direction. A token is masked where D > threshold (D equal to it is kept)
and a step on A log pi would move pi further away. D and direction are constants.

    binary_divergence   the sampled token against all others; needs log-probs alone
    topk_divergence     mu's likeliest tokens and the sampled one, the rest as one tail
    full_divergence     the whole vocabulary, computed by the model's head

Each is the divergence of a coarser partition than the next, so binary <= top-K <= full. KL is
KL(mu || pi) in nats, TV the total variation, at most 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, Terms, on_terms
from rljax.losses.ratio import ANCHORS, Anchor
from rljax.types import Array

Kind = Literal["tv", "kl"]
Tail = Literal["proportional", "uniform", "aggregated", "ignored"]
TAILS = ("proportional", "uniform", "aggregated", "ignored")
FLOOR = 1e-12  # least mass of a tail: in float32 the retained mass may exceed 1
BAND = 1e-7  # probabilities that differ by less count as equal in the sign of TV's slope


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How far the policy is from the distribution that sampled, per token.

    Attributes:
      name: how messages and chains call it.
      value: (terms, batch) -> D [B, T], at least 0.
      slope: (terms, batch) -> dD/ds [B, T] at s = 0 of the policy with logits z + s (e_a - pi),
        a the sampled token: the step that one unit of advantage takes. None where it tells no more
        than the ratio.
      needs: Batch fields and live arrays that `value` reads; slope_needs: that `slope` reads too.
      anchor: Batch field of mu's log-probs of the sampled tokens.
      limit: the largest value D can take.
    """

    name: str
    value: Callable[[Terms, Batch], Array]
    slope: Callable[[Terms, Batch], Array] | None = None
    needs: frozenset[str] = frozenset()
    slope_needs: frozenset[str] = frozenset()
    anchor: str = "logp_sampler"
    limit: float = math.inf


def trust_region(
    divergence: Divergence,
    low: float,
    high: float,
    direction: Literal["ratio", "predicted"] = "ratio",
) -> LossTransform:
    """keep = 0 where D > `high` and A > 0, or D > `low` and A < 0, and a step would raise D.

    With direction "ratio" it would where A log(pi / mu) > 0: DPPO (Qi et al. 2026, arXiv
    2602.04879). With "predicted" where A dD/ds > 0, the derivative along that very step: Predictive
    Divergence Masks (Zhou et al. 2026, arXiv 2607.10848).
    Metrics: trust_region/masked, fraction of trained tokens; trust_region/divergence, mean D.

    Args:
      divergence: `binary_divergence`, `topk_divergence`, `full_divergence` or one of your own.
      low: threshold for tokens with A < 0, above 0. high: for tokens with A > 0.
    """
    name = f"trust_region({divergence.name})"
    for label, value in (("low", low), ("high", high)):
        if not 0.0 < value <= divergence.limit:
            raise ValueError(
                f"{label}={value} of {name}; a threshold lies above 0"
                + (f" and at most at {divergence.limit}" if divergence.limit < math.inf else "")
            )
    if direction not in ("ratio", "predicted"):
        raise ValueError(f'direction={direction!r} of {name}; it is "ratio" or "predicted"')
    slope = divergence.slope if direction == "predicted" else None
    if direction == "predicted" and slope is None:
        raise ValueError(
            f'{name} cannot have direction="predicted": the slope of a binary divergence always '
            'has the sign of log(pi / mu), so it is direction="ratio"; take topk_divergence or '
            "full_divergence for a prediction that differs"
        )

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.advantage is not None
        terms_now = jax.lax.stop_gradient(terms)
        value = divergence.value(terms_now, batch)
        if slope is None:
            move = terms_now.logp - getattr(batch, divergence.anchor)
        else:
            move = slope(terms_now, batch)
        limit = jnp.where(batch.advantage > 0, high, low)
        away = jnp.sign(batch.advantage) * jnp.sign(move) > 0
        masked = (away & (value > limit)).astype(jnp.float32)
        terms = terms.replace(keep=terms.keep * (1.0 - masked))
        terms = terms.measured("trust_region/masked", masked, batch.mask)
        return terms.measured("trust_region/divergence", value, batch.mask)

    needs = divergence.needs | {divergence.anchor}
    needs |= divergence.slope_needs if slope is not None else frozenset()
    return on_terms(fn, needs=needs, name=name)


def binary_divergence(kind: Kind = "tv", anchor: Anchor = "sampler") -> Divergence:
    """D of the two-way split into the sampled token and all others (arXiv 2602.04879).

    TV is |mu(a) - pi(a)|. Its derivative along a step, like KL's, has the sign of pi(a) - mu(a),
    because dpi(a)/ds = pi(a) (1 - 2 pi(a) + sum pi^2) >= 0; so there is no predicted direction.

    Args:
      anchor: whose probabilities mu are, "sampler" (what the decode engine recorded), "old" or
        "reference". The paper finds that "old" brings instability back.
    """
    limit = _limit("binary_divergence", kind)
    if anchor not in ANCHORS:
        raise ValueError(
            f"anchor={anchor!r} of binary_divergence; choose from {', '.join(ANCHORS)}"
        )
    field = ANCHORS[anchor]

    def value(terms: Terms, batch: Batch) -> Array:
        log_mu, log_pi = getattr(batch, field), terms.logp
        mu, pi = jnp.exp(log_mu), jnp.exp(log_pi)
        if kind == "tv":
            return jnp.abs(mu - pi)
        others = jnp.where(mu < 1.0, (1.0 - mu) * (_log_rest(log_mu) - _log_rest(log_pi)), 0.0)
        return jnp.maximum(mu * (log_mu - log_pi) + others, 0.0)

    return Divergence(f"binary {kind}", value, anchor=field, limit=limit)


def full_divergence(kind: Kind = "kl") -> Divergence:
    """D over the whole vocabulary, from the live arrays full_kl or full_tv and their slopes."""
    limit = _limit("full_divergence", kind)
    name = f"full_{kind}"
    return Divergence(
        f"full {kind}",
        lambda terms, batch: terms.live[name],
        lambda terms, batch: terms.live[f"{name}_dot"],
        frozenset({name}),
        frozenset({f"{name}_dot"}),
        limit=limit,
    )


def topk_divergence(kind: Kind = "kl", tail: Tail = "proportional", vocab: int = 0) -> Divergence:
    """D over the sampler's K likeliest tokens and the sampled one; all others are one tail token.

    The support is the union, K + 1 tokens where the sampled one is not among the K; slots with id
    -1 or a log-prob of -inf are empty. DPPO (arXiv 2602.04879); in its authors' code the sampled
    token replaces the K-th instead.

    Args:
      tail: for the predicted direction, what is assumed of sum pi^2 over the tail: "proportional"
        reads the true one from the live array sum_squares (exact slope of this D), "uniform" a tail
        flat over `vocab` tokens and "aggregated" one single token (both of arXiv 2607.10848);
        "ignored" leaves the tail out.
      vocab: number of tokens of the vocabulary, for tail="uniform".
    """
    limit = _limit("topk_divergence", kind)
    if tail not in TAILS:
        raise ValueError(f"tail={tail!r} of topk_divergence; choose from {', '.join(TAILS)}")
    if tail == "uniform" and vocab < 2:
        raise ValueError(
            f'vocab={vocab} of topk_divergence; tail="uniform" spreads the tail over the '
            "vocabulary, so give its size, or take another tail"
        )

    def value(terms: Terms, batch: Batch) -> Array:
        x = _Support(terms, batch)
        if kind == "tv":
            shift = jnp.sum(jnp.abs(x.mu - x.pi), axis=-1) + jnp.abs(x.mu_a - x.pi_a)
            return 0.5 * (shift + jnp.abs(x.mu_tail - x.pi_tail))
        kl = jnp.sum(x.mu * x.log_ratio, axis=-1) + x.mu_a * x.log_ratio_a
        return jnp.maximum(kl + x.mu_tail * jnp.log(x.mu_tail / x.pi_tail), 0.0)

    def slope(terms: Terms, batch: Batch) -> Array:
        x = _Support(terms, batch)
        inside = jnp.sum(x.pi**2, axis=-1) + x.pi_a**2
        if tail == "proportional":
            squares = jnp.maximum(terms.live["sum_squares"] - inside, 0.0)
        else:
            part = {"uniform": 1.0 / jnp.maximum(vocab - x.size, 1.0), "aggregated": 1.0}
            squares = x.pi_tail**2 * part.get(tail, 0.0)
        if kind == "kl":
            known = jnp.sum(x.pi * (x.mu - x.pi), axis=-1) + x.pi_a * (x.mu_a - x.pi_a)
            rest = squares / x.pi_tail * (x.mu_tail - x.pi_tail)
            return x.pi_a - x.mu_a + known + rest
        total = inside + squares
        step = x.pi * ((total - x.pi_a)[..., None] - x.pi)  # d pi of the K slots
        step_a = x.pi_a * (1.0 - 2.0 * x.pi_a + total)
        flow = jnp.sum(_sign(x.pi - x.mu) * step, axis=-1) + _sign(x.pi_a - x.mu_a) * step_a
        # What the support gains the tail loses.
        gain = jnp.sum(step, axis=-1) + step_a
        return 0.5 * (flow - _sign(x.pi_tail - x.mu_tail) * gain)

    needs = frozenset({"token", "topk_ids", "topk_logp", "topk_logp_live"})
    more = frozenset({"sum_squares"}) if tail == "proportional" else frozenset()
    return Divergence(f"topk {kind}", value, slope, needs, more, limit=limit)


class _Support:
    """Probabilities of the K slots [B, T, K] without the sampled token, of it, and of the tail."""

    def __init__(self, terms: Terms, batch: Batch):
        assert batch.topk_ids is not None and batch.topk_logp is not None
        assert batch.token is not None and batch.logp_sampler is not None
        live = terms.live["topk_logp_live"]
        used = (batch.topk_ids >= 0) & (batch.topk_ids != batch.token[..., None])
        used &= jnp.isfinite(batch.topk_logp)
        self.size = jnp.sum(used, axis=-1) + 1.0
        self.mu = jnp.where(used, jnp.exp(batch.topk_logp), 0.0)
        self.pi = jnp.where(used, jnp.exp(live), 0.0)
        self.log_ratio = jnp.where(used, batch.topk_logp - jnp.maximum(live, -100.0), 0.0)
        self.mu_a, self.pi_a = jnp.exp(batch.logp_sampler), jnp.exp(terms.logp)
        self.log_ratio_a = batch.logp_sampler - terms.logp
        self.mu_tail = jnp.maximum(1.0 - jnp.sum(self.mu, axis=-1) - self.mu_a, FLOOR)
        self.pi_tail = jnp.maximum(1.0 - jnp.sum(self.pi, axis=-1) - self.pi_a, FLOOR)


def _limit(name: str, kind: str) -> float:
    """The largest value of the divergence; refuses an unknown kind."""
    if kind not in ("tv", "kl"):
        raise ValueError(f'kind={kind!r} of {name}; it is "tv" or "kl"')
    return 1.0 if kind == "tv" else math.inf


def _log_rest(logp: Array) -> Array:
    """log(1 - exp(logp)), without cancellation, floored where exp(logp) is 1."""
    return jnp.log(jnp.maximum(-jnp.expm1(logp), 1e-30))


def _sign(x: Array) -> Array:
    return jnp.where(jnp.abs(x) <= BAND, 0.0, jnp.sign(x))
