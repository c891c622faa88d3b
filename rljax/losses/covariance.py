"""Clip-Cov and KL-Cov: the few tokens that lower the entropy most are held back.

Entropy falls with the covariance of log pi and advantage under the policy (Cui et al. 2025, arXiv
2505.22617), so tokens of the largest (log pi - mean log pi) (A - mean A), means over the trained
tokens of the batch, are picked in `prepare` (`Batch.chosen`), the same for any microbatches.
Departure: log pi is the sampler's, which the full batch has; the paper takes the trainer's.
Metric covariance/chosen: fraction of trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, State, Terms
from rljax.types import Array


def clip_cov(fraction: float = 2e-4, low: float = 1.0, high: float = 5.0) -> LossTransform:
    """keep = 0 on the `fraction` of tokens of the largest covariance within [low, high].

    Departure: the paper draws them at random within the band.
    """
    if not low < high:
        raise ValueError(f"clip_cov(low={low}, high={high}); low must be below high")

    def act(terms: Terms, chosen: Array) -> Terms:
        return terms.replace(keep=terms.keep * (1.0 - chosen))

    return _on_chosen("clip_cov", fraction, low, high, act)


def kl_cov(coefficient: float = 1.0, fraction: float = 2e-3) -> LossTransform:
    """extra += coefficient |log ratio| on the `fraction` of tokens of the largest covariance.

    The estimate of KL(old || pi) in the authors' code. Its gradient is 0 at ratio 1, so it acts
    from the second update of a batch on. Put it after the ratio.
    """
    if not 0.0 < coefficient < math.inf:
        raise ValueError(f"kl_cov(coefficient={coefficient}); it must be above 0 and finite")

    def act(terms: Terms, chosen: Array) -> Terms:
        return terms.replace(extra=terms.extra + coefficient * chosen * jnp.abs(terms.log_ratio))

    return _on_chosen("kl_cov", fraction, -math.inf, math.inf, act, ["ratio"])


def _on_chosen(
    name: str,
    fraction: float,
    low: float,
    high: float,
    act: Callable[[Terms, Array], Terms],
    needs: list[str] | None = None,
) -> LossTransform:
    """Chooses floor(fraction * trained tokens), at least one, and applies `act` to them."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction={fraction} of {name}; a fraction of the tokens lies in (0, 1]")

    def prepare(batch: Batch, state: State) -> tuple[Batch, State]:
        value, ok = _covariance(batch)
        value = jnp.where(ok & (value >= low) & (value <= high), value, -jnp.inf).reshape(-1)
        most = max(1, math.floor(fraction * value.size))
        largest, place = jax.lax.top_k(value, most)
        count = jnp.maximum(jnp.floor(fraction * jnp.sum(ok)), 1.0)
        taken = (jnp.arange(most) < count) & (largest > -jnp.inf)
        chosen = jnp.zeros_like(value).at[place].set(taken.astype(jnp.float32))
        return batch.replace(chosen=chosen.reshape(ok.shape)), state

    def update(terms: Terms, batch: Batch, state: State) -> Terms:
        assert batch.chosen is not None
        terms = act(terms, batch.chosen)
        return terms.measured("covariance/chosen", batch.chosen, batch.mask)

    reads = frozenset({"advantage", "logp_sampler", "mask", *(needs or ())})
    return LossTransform(
        prepare=prepare, update=update, needs=reads, gives=frozenset({"chosen"}), name=name
    )


def _covariance(batch: Batch) -> tuple[Array, Array]:
    """([B, T] covariance terms, [B, T] bool where they are defined)."""
    assert batch.advantage is not None and batch.logp_sampler is not None
    ok = (batch.mask > 0) & jnp.isfinite(batch.logp_sampler)
    logp = jnp.where(ok, batch.logp_sampler, 0.0)
    count = jnp.maximum(jnp.sum(ok), 1)

    def centred(x: Array) -> Array:
        return x - jnp.sum(jnp.where(ok, x, 0.0)) / count

    return centred(logp) * centred(batch.advantage), ok
