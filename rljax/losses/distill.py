"""Losses that imitate: negative log-likelihood of given responses (supervised fine-tuning)."""

from __future__ import annotations

from rljax.losses.base import Batch, LossTransform, on_batch


def nll() -> LossTransform:
    """loss_t = -log pi_t: advantage 1 on every trained token, no ratio.

    The mask says which tokens are imitated; nothing else of the batch is read.
    """

    def fn(batch: Batch) -> Batch:
        return batch.replace(advantage=batch.mask)

    return on_batch(fn, needs=["mask"], gives=["advantage"], name="nll")
