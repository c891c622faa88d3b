"""Losses that imitate: given responses (supervised fine-tuning), or a teacher (distillation)."""

from __future__ import annotations

import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, on_batch


def nll() -> LossTransform:
    """loss_t = -log pi_t: advantage 1 on every trained token, no ratio.

    The mask says which tokens are imitated; nothing else of the batch is read.
    """

    def fn(batch: Batch) -> Batch:
        return batch.replace(advantage=batch.mask)

    return on_batch(fn, needs=["mask"], gives=["advantage"], name="nll")


def teacher_gain() -> LossTransform:
    """A_t = log teacher - log pi of the sampled token: the reverse KL to the teacher, by token.

    The teacher's log-probs are `Batch.logp_ref`, the policy's those of the sampler. With g = log pi
    the gradient is that of sum_t KL(pi || teacher) of the next-token distributions at the states
    that the policy visits, as `kl_to_reference(1.0, "k2")` has it; what a token does to later
    states is left out. On-policy distillation (Agarwal et al. 2023, arXiv 2306.13649, section 3).
    """

    def fn(batch: Batch) -> Batch:
        assert batch.logp_ref is not None and batch.logp_sampler is not None
        gain = batch.logp_ref - batch.logp_sampler
        known = (batch.mask > 0) & jnp.isfinite(gain)
        return batch.replace(advantage=jnp.where(known, gain, 0.0).astype(jnp.float32))

    needs = ["logp_ref", "logp_sampler"]
    return on_batch(fn, needs=needs, gives=["advantage"], name="teacher_gain")
