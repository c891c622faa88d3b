"""Advantages from rewards: group baselines, returns, whitening, and the shaping that DAPO adds.

All run in `prepare`, on the full batch. Groups are found by id, so rows may come in any order and
any int32 serves as an id. A response whose reward is not finite (none came) is left out of its
group's statistics; the chain has masked its tokens.

Whether rewards differ at all is judged by their spread (max - min) against a floor, never by a
standard deviation, which is rounding residue when they do not.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, on_batch
from rljax.types import Array

FLOOR = 1e-6  # rewards that differ by less, relative to max(1, |reward|), count as equal
Singleton = Literal["zero", "raw"]


def group_ids(group: Array) -> Array:
    """The first row of each row's group: [B] ids of any value -> [B] ids below B."""
    return jnp.argmax(group[:, None] == group[None, :], axis=1)


def group_centre(singleton: Singleton = "zero") -> LossTransform:
    """A = R - mean of the group.

    The baseline of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2) and of REINFORCE++
    with baseline.

    Args:
      singleton: advantage of a response alone in its group: 0, or its reward as in verl.
    """

    def fn(batch: Batch) -> Batch:
        return _fill(batch, _Group(batch).centred(singleton))

    return on_batch(fn, needs=GROUPED, gives=["advantage"], name="group_centre")


def group_standardise(
    by: Literal["group", "batch"] = "group", eps: float = 1e-6, singleton: Singleton = "zero"
) -> LossTransform:
    """A = (R - mean of the group) / (std + eps), unbiased std of the group or of the whole batch.

    GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2) with by="group"; Flow-GRPO's global
    scale with by="batch". Where the rewards that the std is taken of are all equal, the centred
    reward is kept.
    """
    if by not in ("group", "batch"):
        raise ValueError(f'by={by!r}; it is "group" or "batch"')
    _check_positive("eps", eps)

    def fn(batch: Batch) -> Batch:
        group = _Group(batch)
        one = group if by == "group" else _Group(batch.replace(group=0 * group.ids))
        deviation = one.centred("zero")
        variance = one.total(deviation**2) / jnp.maximum(one.count - 1, 1)
        std = jnp.where(one.flat, 1.0, jnp.sqrt(jnp.where(one.flat, 1.0, variance)))
        return _fill(batch, group.centred(singleton) / (std + eps))

    return on_batch(fn, needs=GROUPED, gives=["advantage"], name="group_standardise")


def leave_one_out(
    standardise: bool = False, eps: float = 1e-6, singleton: Singleton = "zero"
) -> LossTransform:
    """A = R - mean of the others in the group = (R - mean) n / (n - 1).

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740, section 3.3).

    Args:
      standardise: also divide by the unbiased std of the others plus eps; where the others are all
        equal, the centred reward is kept. Takes [B, B] floats, for a two-pass variance.
      singleton: advantage of a response alone in its group: 0, or its reward as in verl.
    """
    _check_positive("eps", eps)

    def fn(batch: Batch) -> Batch:
        group = _Group(batch)
        scale = group.count / jnp.maximum(group.count - 1, 1)
        advantage = group.centred(singleton) * scale
        return _fill(batch, advantage / group.std_of_others(eps) if standardise else advantage)

    return on_batch(fn, needs=GROUPED, gives=["advantage"], name="leave_one_out")


def returns_to_go(gamma: float = 1.0) -> LossTransform:
    """A_t = sum over trained tokens k >= t of gamma^(number of trained tokens between) reward_k.

    `Batch.reward` sits on the last trained token, `Batch.token_reward` where it was given. Time
    counts trained tokens only, so text that a tool wrote in between neither decays nor cuts the
    return. REINFORCE++ (Hu 2025, arXiv 2501.03262); without its KL penalty in the reward.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma={gamma}; a discount lies in [0, 1]")

    def fn(batch: Batch) -> Batch:
        returns = discounted(token_rewards(batch), batch.mask, gamma)
        return batch.replace(advantage=jnp.where(batch.mask > 0, returns, 0.0))

    return on_batch(fn, needs=["reward"], gives=["advantage"], name="returns_to_go")


def token_rewards(batch: Batch) -> Array:
    """[B, T]: `Batch.reward` on the last trained token, plus `Batch.token_reward` where given."""
    mask = batch.mask
    after = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # trained tokens from t on
    reward = jnp.where((mask > 0) & (after == 1), _known(batch)[0][:, None], 0.0)
    return reward if batch.token_reward is None else reward + batch.token_reward


def discounted(x: Array, mask: Array, decay: Array | float) -> Array:
    """out_t = x_t + decay * out_(t+1) at trained tokens; elsewhere out_t = out_(t+1). All [B, T].

    Args:
      decay: a number, or one a row [B].
    """

    def step(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        x, m = now  # [B]
        later = jnp.where(m > 0, x + decay * later, later)
        return later, later

    start = jnp.zeros_like(x[:, 0])
    return jax.lax.scan(step, start, (x.T, mask.T), reverse=True)[1].T


def whiten(eps: float = 1e-8) -> LossTransform:
    """A <- (A - mean) / sqrt(var + eps) over the trained tokens of the batch, unbiased variance.

    The batch normalisation of REINFORCE++ (arXiv 2501.03262); equal advantages become 0.
    """
    _check_positive("eps", eps)

    def fn(batch: Batch) -> Batch:
        assert batch.advantage is not None
        a, mask = batch.advantage, batch.mask
        count = jnp.sum(mask)
        centred = (a - jnp.sum(a * mask) / jnp.maximum(count, 1.0)) * mask
        variance = jnp.sum(centred**2) / jnp.maximum(count - 1.0, 1.0)
        inside = mask > 0
        low, high = (
            jnp.min(jnp.where(inside, a, jnp.inf)),
            jnp.max(jnp.where(inside, a, -jnp.inf)),
        )
        flat = ~(high - low > _floor(jnp.max(jnp.abs(a) * mask)))
        return batch.replace(
            advantage=jnp.where(flat, 0.0, centred * jax.lax.rsqrt(variance + eps))
        )

    return on_batch(fn, needs=["advantage"], gives=["advantage"], name="whiten")


def overlong(max_length: int, buffer: int, factor: float = 1.0) -> LossTransform:
    """R <- R - factor * clip((length - (max_length - buffer)) / buffer, 0, 1).

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13). Lengths are
    in tokens, `max_length` the length from which the whole penalty applies.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"buffer={buffer} with max_length={max_length}; the penalty grows over the last "
            "`buffer` tokens of the limit, so 0 < buffer <= max_length"
        )
    _check_positive("factor", factor)

    def fn(batch: Batch) -> Batch:
        if batch.advantage is not None:
            raise ValueError(
                "overlong shapes the reward, but the advantage is already there; put it before "
                "the advantage member, and leave Batch.advantage empty"
            )
        assert batch.length is not None and batch.reward is not None
        over = (batch.length.astype(jnp.float32) - (max_length - buffer)) / buffer
        return batch.replace(reward=batch.reward - factor * jnp.clip(over, 0.0, 1.0))

    return on_batch(fn, needs=["reward", "length"], name="overlong")


def drop_flat_groups() -> LossTransform:
    """Masks out the groups whose rewards are all equal: no gradient, no place in a denominator.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2) within a fixed batch: the paper refills
    the batch, here it gets smaller and `Batch.weight` counts what is left. Rewards are read as they
    stand in the chain: before `overlong`, the raw ones.

    Without it a flat group has advantage 0, yet still moves the parameters through KL and entropy
    terms; with it nothing of the group does.
    """

    def fn(batch: Batch) -> Batch:
        return batch.replace(mask=jnp.where(_Group(batch).flat[:, None], 0.0, batch.mask))

    needs = [*GROUPED, "mask"]
    return on_batch(fn, needs=needs, gives=["mask"], name="drop_flat_groups")


def drop_truncated() -> LossTransform:
    """Masks out responses that hit the token limit, in the loss and in its denominators alike.

    Overlong filtering of DAPO (arXiv 2503.14476, section 3.4). Their rewards still count in the
    statistics of their group.
    """

    def fn(batch: Batch) -> Batch:
        assert batch.truncated is not None
        return batch.replace(mask=jnp.where(batch.truncated[:, None] > 0, 0.0, batch.mask))

    return on_batch(fn, needs=["truncated", "mask"], gives=["mask"], name="drop_truncated")


GROUPED = ("reward", "group", "group>1")


class _Group:
    """Statistics of each row's group, all [B] float32 unless said otherwise."""

    def __init__(self, batch: Batch):
        assert batch.group is not None
        self.reward, self.known = _known(batch)
        self.ids = group_ids(batch.group)
        self.count = self.total(jnp.ones_like(self.reward))
        scale = self.largest(jnp.abs(self.reward))
        spread = self.largest(self.reward) + self.largest(-self.reward)
        self.flat = ~(spread > _floor(scale))  # bool

    def total(self, x: Array) -> Array:
        """Sum of x over each row's group, rows without a reward left out."""
        x = jnp.where(self.known, x, 0.0)
        return jax.ops.segment_sum(x, self.ids, num_segments=len(x))[self.ids]

    def largest(self, x: Array) -> Array:
        """Maximum of x over each row's group, -inf where no row has a reward."""
        x = jnp.where(self.known, x, -jnp.inf)
        return jax.ops.segment_max(x, self.ids, num_segments=len(x))[self.ids]

    def centred(self, singleton: Singleton) -> Array:
        """R - mean of the group, exactly 0 in a group of equal rewards."""
        if singleton not in ("zero", "raw"):
            raise ValueError(f'singleton={singleton!r}; it is "zero" or "raw"')
        mean = self.total(self.reward) / jnp.maximum(self.count, 1.0)
        centred = jnp.where(self.flat, 0.0, self.reward - mean)
        alone = self.reward if singleton == "raw" else jnp.zeros_like(self.reward)
        return jnp.where(self.known, jnp.where(self.count > 1, centred, alone), 0.0)

    def std_of_others(self, eps: float) -> Array:
        """Unbiased std of the other rewards of the group plus eps; 1 where they are all equal."""
        same = (self.ids[:, None] == self.ids[None, :]) & self.known[None, :]
        others = same & ~jnp.eye(len(self.ids), dtype=bool)  # [B, B]
        r = jnp.broadcast_to(self.reward[None, :], others.shape)
        count = jnp.sum(others, axis=1).astype(jnp.float32)
        mean = jnp.sum(jnp.where(others, r, 0.0), axis=1) / jnp.maximum(count, 1.0)
        square = jnp.where(others, (r - mean[:, None]) ** 2, 0.0)
        variance = jnp.sum(square, axis=1) / jnp.maximum(count - 1.0, 1.0)
        high = jnp.max(jnp.where(others, r, -jnp.inf), axis=1)
        low = jnp.min(jnp.where(others, r, jnp.inf), axis=1)
        varied = high - low > _floor(jnp.maximum(jnp.abs(high), jnp.abs(low)))
        return jnp.where(varied, jnp.sqrt(jnp.where(varied, variance, 1.0)) + eps, 1.0)


def _known(batch: Batch) -> tuple[Array, Array]:
    """([B] rewards with 0 where none came, [B] bool whether one came)."""
    assert batch.reward is not None
    reward = batch.reward.astype(jnp.float32)
    known = jnp.isfinite(reward)
    return jnp.where(known, reward, 0.0), known


def _floor(scale: Array) -> Array:
    return FLOOR * jnp.maximum(scale, 1.0)


def _fill(batch: Batch, advantage: Array) -> Batch:
    """Gives each trained token its sequence's advantage [B]."""
    return batch.replace(advantage=jnp.where(batch.mask > 0, advantage[:, None], 0.0))


def _check_positive(name: str, value: Any) -> None:
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name}={value}; it must be positive and finite")
