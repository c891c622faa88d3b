"""Returns: advantages and critic targets from rewards and the values of a critic, token by token.

All run in `prepare` and read `Batch.value`, the critic before the update. Time counts trained
tokens only: text that a tool wrote, and any other token under mask 0, has no value, no discount and
no lambda of its own. After the last trained token the value is 0.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from rljax.losses.advantage import discounted, token_rewards
from rljax.losses.base import Batch, LossTransform, State, on_batch
from rljax.losses.ratio import ANCHORS, Anchor
from rljax.losses.regularise import KINDS, Kind, kl_estimate
from rljax.types import Array


def gae(
    gamma: float = 1.0, lambda_: float = 0.95, target_lambda: float | None = None
) -> LossTransform:
    """A_t = sum_l (gamma lambda)^l d_(t+l), d_t = r_t + gamma V_(t+1) - V_t; target_t = A_t + V_t.

    Schulman et al. 2016, arXiv 1506.02438, equation 16.

    Args:
      target_lambda: lambda of the critic's target alone; None = `lambda_`, 1 = Monte-Carlo returns.
    """
    _check_unit("gae", gamma=gamma, lambda_=lambda_, target_lambda=target_lambda or 0.0)
    return _gae("gae", gamma, lambda mask: jnp.float32(lambda_), target_lambda)


def length_adaptive_gae(
    alpha: float = 0.4, gamma: float = 1.0, target_lambda: float | None = 1.0
) -> LossTransform:
    """`gae` with lambda = 1 - 1 / (alpha L) of each response, L its trained tokens.

    lambda^L tends to exp(-1 / alpha) for any length, where a fixed lambda forgets the end of a long
    response. VAPO (Yue et al. 2025, arXiv 2504.05118, section 4.2, alpha 0.05); BPCO
    (arXiv 2608.23566, alpha 0.4). Departure: lambda is clamped to [0, 1], it would be negative for
    L < 1 / alpha.

    Args:
      target_lambda: lambda of the critic's target; None = that of the advantage.
    """
    _check_unit("length_adaptive_gae", gamma=gamma, target_lambda=target_lambda or 0.0)
    if not 0.0 < alpha < math.inf:
        raise ValueError(
            f"length_adaptive_gae(alpha={alpha}); it must be positive, for instance 0.4"
        )
    return _gae(
        "length_adaptive_gae", gamma, lambda mask: adaptive_lambda(mask, alpha), target_lambda
    )


def monte_carlo(gamma: float = 1.0) -> LossTransform:
    """target_t = the discounted rewards from t on, A_t = target_t - V_t: `gae` with lambda 1."""
    _check_unit("monte_carlo", gamma=gamma)
    return _gae("monte_carlo", gamma, lambda mask: jnp.float32(1.0), None)


def adaptive_lambda(mask: Array, alpha: float) -> Array:
    """clip(1 - 1 / (alpha L), 0, 1) of each row of mask [B, T]; [B], 0 for an empty row."""
    length = jnp.maximum(jnp.sum(mask, axis=1), 1.0)
    return jnp.clip(1.0 - 1.0 / (alpha * length), 0.0, 1.0)


def kl_in_reward(
    coefficient: float = 0.05,
    target: float | None = None,
    gain: float = 0.1,
    kind: Kind = "k1",
    anchor: Anchor = "sampler",
) -> LossTransform:
    """r_t -= coefficient * k(log pi_anchor - log ref) at each trained token, before any returns.

    The penalty of Ziegler et al. 2019, arXiv 1909.08593, section 2.2, equation 2, with their
    controller where `target` is given: after each batch the coefficient is multiplied by
    1 + gain * clip(KL / target - 1, -0.2, 0.2), KL in nats a response. Departure: a batch is one
    call of `prepare`, so with several updates a rollout it moves that often.

    Args:
      coefficient: constant, or where the controller starts.
      target: KL in nats a response that the controller steers to; None keeps the coefficient.
      anchor: log-probs of the policy that wrote the response: "sampler" or "old".
    """
    if not 0.0 <= coefficient < math.inf:
        raise ValueError(f"kl_in_reward(coefficient={coefficient}); it must be at least 0, finite")
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} of kl_in_reward; choose from {', '.join(KINDS)}")
    if anchor not in ("sampler", "old"):
        raise ValueError(f'anchor={anchor!r} of kl_in_reward; it is "sampler" or "old"')
    if target is not None and not (0.0 < target < math.inf and 0.0 < gain < 5.0 and coefficient):
        raise ValueError(
            f"kl_in_reward(coefficient={coefficient}, target={target}, gain={gain}) cannot steer; "
            "coefficient and target must be positive and gain lie in (0, 5), for instance 0.1"
        )
    field = ANCHORS[anchor]

    def init(batch: Batch) -> State:
        del batch
        return () if target is None else jnp.float32(coefficient)

    def prepare(batch: Batch, state: State) -> tuple[Batch, State]:
        if batch.advantage is not None:
            raise ValueError(
                "kl_in_reward shapes the reward, but the advantage is already there; put it "
                "before gae() or returns_to_go(), and leave Batch.advantage empty"
            )
        kl = batch.mask * kl_estimate(getattr(batch, field) - batch.logp_ref, kind)
        given = 0.0 if batch.token_reward is None else batch.token_reward
        reward = given - (coefficient if target is None else state) * kl
        if target is not None:
            responses = jnp.sum(jnp.any(batch.mask > 0, axis=1))
            mean = jnp.sum(kl) / jnp.maximum(responses, 1.0)
            error = jnp.clip(mean / target - 1.0, -0.2, 0.2)
            state = jnp.where(responses > 0, state * (1.0 + gain * error), state)
        return batch.replace(token_reward=reward), state

    return LossTransform(
        init, prepare, needs=frozenset({field, "logp_ref", "mask"}),
        gives=frozenset({"token_reward"}), name="kl_in_reward",
    )  # fmt: skip


def _gae(name: str, gamma: float, lambda_of, target_lambda: float | None) -> LossTransform:
    def fn(batch: Batch) -> Batch:
        assert batch.value is not None
        mask, value = batch.mask, batch.value.astype(jnp.float32)
        held = discounted(value, mask, 0.0)  # value of the first trained token from t on
        after = jnp.pad(held[:, 1:], ((0, 0), (0, 1)))
        delta = token_rewards(batch) + gamma * after - value

        def sums(lambda_: Array) -> Array:
            return jnp.where(mask > 0, discounted(delta, mask, gamma * lambda_), 0.0)

        advantage = sums(lambda_of(mask))
        target = advantage if target_lambda is None else sums(jnp.float32(target_lambda))
        value_target = jnp.where(mask > 0, target + value, 0.0)
        return batch.replace(advantage=advantage, value_target=value_target)

    return on_batch(
        fn, needs=["reward", "value", "mask"], gives=["advantage", "value_target"], name=name
    )


def _check_unit(member: str, **values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}={value} of {member}; it lies in [0, 1]")
