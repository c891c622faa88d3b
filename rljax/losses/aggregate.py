"""Aggregates: the one place that owns a denominator.

Each fixes `Batch.weight` on the full batch, so that the loss is sum(weight * per-token loss) over
any slices of it. Sequences and prompts without a trained token are not counted; a batch without any
has weight 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.losses.advantage import group_ids
from rljax.losses.base import Batch, LossTransform, on_batch
from rljax.types import Array


def token_mean() -> LossTransform:
    """1 / (trained tokens of the batch): DAPO (arXiv 2503.14476, section 3.3)."""
    return _aggregate("token_mean", lambda batch: batch.mask / _count(jnp.sum(batch.mask)))


def token_sum() -> LossTransform:
    """1 for each trained token; the value grows with the batch."""
    return _aggregate("token_sum", lambda batch: batch.mask)


def sequence_mean_token_sum() -> LossTransform:
    """1 / (sequences): the log-prob of a sequence as one action, as in RLOO (arXiv 2402.14740)."""
    return _aggregate("sequence_mean_token_sum", lambda batch: batch.mask / _sequences(batch.mask))


def sequence_mean_token_sum_norm(horizon: float) -> LossTransform:
    """1 / (sequences * horizon): constant length, so that long answers are not favoured.

    Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2).

    Args:
      horizon: a constant, normally the token limit of a response; not the padded length of a batch,
        which changes.
    """
    if not 0 < horizon < float("inf"):
        raise ValueError(
            f"horizon={horizon} of sequence_mean_token_sum_norm; it is a length in tokens, "
            "normally the limit of a response"
        )
    return _aggregate(
        "sequence_mean_token_sum_norm",
        lambda batch: batch.mask / (_sequences(batch.mask) * horizon),
    )


def sequence_mean_token_mean() -> LossTransform:
    """1 / (sequences * trained tokens of the sequence): GRPO (arXiv 2402.03300, equation 3)."""

    def weigh(batch: Batch) -> Array:
        tokens = jnp.sum(batch.mask, axis=1, keepdims=True)
        return batch.mask / (_count(tokens) * _sequences(batch.mask))

    return _aggregate("sequence_mean_token_mean", weigh)


def prompt_mean() -> LossTransform:
    """1 / (prompts * trained tokens of all responses to the prompt): each prompt counts the same.

    The prompt average of ScaleRL (Khatri et al. 2025, arXiv 2510.13786).
    """

    def weigh(batch: Batch) -> Array:
        assert batch.group is not None
        ids = group_ids(batch.group)
        tokens = jax.ops.segment_sum(jnp.sum(batch.mask, axis=1), ids, num_segments=len(ids))
        prompts = _count(jnp.sum(tokens > 0))
        return batch.mask / (_count(tokens)[ids][:, None] * prompts)

    return _aggregate("prompt_mean", weigh, needs=["group"])


def _count(x: Array) -> Array:
    return jnp.maximum(x, 1.0)


def _sequences(mask: Array) -> Array:
    """Number of sequences with a trained token."""
    return _count(jnp.sum(jnp.any(mask > 0, axis=1)))


def _aggregate(name: str, weigh: Callable[[Batch], Array], needs=()) -> LossTransform:
    def fn(batch: Batch) -> Batch:
        return batch.replace(weight=weigh(batch))

    return on_batch(fn, needs=["mask", *needs], gives=["weight"], name=name)
