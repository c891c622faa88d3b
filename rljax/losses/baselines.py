"""Baselines beyond the group's mean: by role, by budget, by the best of k, and credit by turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from rljax.losses.advantage import _fill, _Group, _known
from rljax.losses.base import Batch, LossTransform, State, on_batch
from rljax.types import Array

Order = Literal["subtract_first", "update_first"]


def role_baseline(
    roles: int = 2, decay: float = 0.95, gamma: float = 1.0, order: Order = "subtract_first"
) -> LossTransform:
    """A = R - b[role], then b[role] <- decay b[role] + (1 - decay) R, one response after the other.

    Role-conditioned advantage estimation of SPIRAL (Liu et al. 2025, arXiv 2506.24119): removes
    what the seat at the table is worth. The state is b [roles] float32, from 0; rows count in
    batch order, and a row without a reward leaves b alone. A role outside 0..roles - 1 gives NaN.

    Args:
      roles: number of ids in `Batch.role`; for several games, id = game * seats + seat.
      gamma: discount by turn, gamma^(last trained turn - turn of the token); 1 reads no turns.
      order: the released code subtracts first, the paper's listing updates first, which only
        scales A by `decay`.
    """
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"decay={decay} of role_baseline; it lies in [0, 1)")
    _check_discount(gamma)
    if order not in ("subtract_first", "update_first"):
        raise ValueError(f'order={order!r}; it is "subtract_first" or "update_first"')

    def prepare(batch: Batch, table: State) -> tuple[Batch, State]:
        reward, known = _known(batch)
        assert batch.role is not None

        def step(table: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            r, role, came = row
            before = table[role]
            after = decay * before + (1 - decay) * r
            table = table.at[role].set(jnp.where(came, after, before))
            return table, r - (before if order == "subtract_first" else after)

        role = batch.role.astype(jnp.int32)
        table, advantage = jax.lax.scan(step, table, (reward, role, known))
        advantage = jnp.where((role >= 0) & (role < roles), advantage, jnp.nan)
        batch = _fill(batch, jnp.where(known, advantage, 0.0))
        if gamma != 1.0:
            assert batch.turn is not None and batch.advantage is not None
            turn = batch.turn.astype(jnp.float32)
            last = jnp.max(jnp.where(batch.mask > 0, turn, 0.0), axis=1, keepdims=True)
            batch = batch.replace(advantage=batch.advantage * gamma ** (last - turn))
        return batch, table

    return LossTransform(
        init=lambda batch: jnp.zeros(roles, jnp.float32),
        prepare=prepare,
        needs=frozenset({"reward", "role"} | ({"turn"} if gamma != 1.0 else set())),
        gives=frozenset({"advantage"}),
        name="role_baseline",
    )


Baseline = Literal["both", "earlier", "group", "none"]


def budget_relative(
    budgets: Sequence[int], prior: Sequence[float] | None = None, baseline: Baseline = "both"
) -> LossTransform:
    """Advantage of reasoning that may be cut at any of S budgets and is judged at each.

    Token t (from 0) of segment s, budgets[s - 1] <= t < budgets[s], gets R_s - V_s:

        R_s  = sum_{k >= s} P_k r_k                    r_k = Batch.budget_score[:, k]
        V1_s = sum_{k >= s} P_k * sum_{k < s} 2^k r_k / sum_{k < s} 2^k        (V1_0 = 0)
        V2_s = mean of R_s over the group              (0 where there is one response)
        V_s  = (s V1_s + (S - s) V2_s) / S

    BRPO of AnytimeReasoner (Qi et al. 2025, arXiv 2505.13438), without a standard deviation. Text
    after the last budget gets 0. The summaries learn from `group_centre` with one group for each
    response and budget. A response with a score that is not finite is not trained on.

    Args:
      budgets: rising lengths in tokens.
      prior: P, how likely each budget is; None = equally.
      baseline: V_s as above, V1 alone ("earlier"), V2 alone ("group"), or 0.
    """
    budgets = tuple(budgets)
    S = len(budgets)
    weights = tuple(prior) if prior is not None else (1.0 / max(S, 1),) * S
    if not S or budgets[0] < 1 or any(a >= b for a, b in itertools.pairwise(budgets)):
        raise ValueError(f"budgets={budgets} of budget_relative; give lengths that rise from 1")
    if len(weights) != S:
        raise ValueError(f"{len(weights)} prior weights for {S} budgets; give one each")
    if baseline not in ("both", "earlier", "group", "none"):
        raise ValueError(f'baseline={baseline!r}; it is "both", "earlier", "group" or "none"')

    def fn(batch: Batch) -> Batch:
        score = batch.budget_score
        assert score is not None and batch.group is not None
        if score.shape[1] != S:
            raise ValueError(f"Batch.budget_score has {score.shape[1]} columns for {S} budgets")
        known, P = jnp.all(jnp.isfinite(score), axis=1), jnp.asarray(weights, jnp.float32)
        r = jnp.where(known[:, None], score.astype(jnp.float32), 0.0)  # [B, S]
        own = jnp.cumsum((P * r)[:, ::-1], axis=1)[:, ::-1]
        left = jnp.cumsum(P[::-1])[::-1]
        w = 2.0 ** (jnp.arange(S) - S)  # the factor 2^-S cancels
        before = jnp.cumsum(w * r, axis=1) - w * r
        v1 = left * before / jnp.maximum(jnp.cumsum(w) - w, w[0])
        groups = [_Group(batch.replace(reward=jnp.where(known, x, jnp.nan))) for x in own.T]
        means = [jnp.where(g.count > 1, g.total(g.reward) / g.count, 0.0) for g in groups]
        v2 = jnp.stack(means, axis=1)
        s = jnp.arange(S)
        both = (s * v1 + (S - s) * v2) / S
        value = {"both": both, "earlier": v1, "group": v2, "none": jnp.zeros_like(r)}[baseline]
        at = jnp.arange(batch.mask.shape[1])
        segment = jnp.searchsorted(jnp.asarray(budgets), at, side="right")
        gain = jnp.pad(own - value, ((0, 0), (0, 1)))[:, segment]  # [B, T]
        mask = jnp.where(known[:, None], batch.mask, 0.0)
        return batch.replace(mask=mask, advantage=jnp.where(mask > 0, gain, 0.0))

    needs = ["budget_score", "group", "mask"]
    return on_batch(fn, needs=needs, gives=["advantage", "mask"], name="budget_relative")


def pass_at_k_gain(k: int, threshold: float = 0.5) -> LossTransform:
    """Advantage of a response in a random k-subset of its group, rewarded by the subset's best.

    With n responses of which m are wrong (reward <= threshold), in closed form the mean over all
    subsets of the reward of a subset, standardised over subsets:

        p = 1 - C(m, k) / C(n, k),    sd = sqrt(p (1 - p))
        right: (1 - p) / sd           wrong: (1 - p - C(m - 1, k - 1) / C(n - 1, k - 1)) / sd

    Pass@k training (Chen et al. 2025, arXiv 2508.10751, analytical derivation); k = 1 is GRPO with
    the biased std. 0 where all subsets are worth the same, so the group must be larger than k.
    """
    if k < 1:
        raise ValueError(f"k={k} of pass_at_k_gain; a subset has at least 1 response")

    def all_wrong(m: Array, n: Array, k: int) -> Array:
        """C(m, k) / C(n, k)."""
        factors = [jnp.maximum(m - i, 0) / jnp.maximum(n - i, 1) for i in range(k)]
        return math.prod(factors, start=jnp.ones_like(n))

    def fn(batch: Batch) -> Batch:
        group = _Group(batch)
        right = group.reward > threshold
        n, m = group.count, group.total(jnp.where(right, 0.0, 1.0))
        p = 1 - all_wrong(m, n, k)
        mixed = (n > k) & (p > 0) & (p < 1)
        sd = jnp.sqrt(jnp.where(mixed, p * (1 - p), 1.0))
        spoiled = jnp.where(right, 0.0, all_wrong(m - 1, n - 1, k - 1))
        return _fill(batch, jnp.where(mixed & group.known, (1 - p - spoiled) / sd, 0.0))

    needs = ["reward", "group", f"group>{k}"]
    return on_batch(fn, needs=needs, gives=["advantage"], name="pass_at_k_gain")


def turn_returns(gamma: float = 1.0) -> LossTransform:
    """A of every trained token of turn k: sum over turns j >= k of gamma^(j - k) reward of turn j.

    The reward of a turn is the sum of `Batch.token_reward` over its trained tokens, and
    `Batch.reward` comes on top in the last one. Turns follow each other in `Batch.turn`, and only
    those with a trained token count: what an environment or a tool wrote in between neither has
    credit nor takes time. A reward that an environment gives in reply to a turn belongs on that
    turn's last trained token. Turn-level
    credit, as in arXiv 2505.11821.
    """
    _check_discount(gamma)

    def fn(batch: Batch) -> Batch:
        assert batch.turn is not None
        mask, turn = batch.mask, batch.turn.astype(jnp.int32)
        after = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # trained tokens from t on
        reward = jnp.where((mask > 0) & (after == 1), _known(batch)[0][:, None], 0.0)
        if batch.token_reward is not None:
            reward = reward + batch.token_reward

        def back(carry: tuple[Array, Array], now: tuple[Array, ...]) -> tuple:
            later, of = carry  # [B] return from the token after on, and its turn
            r, k, m = now
            total = r + jnp.where(k == of, later, gamma * later)
            carry = jnp.where(m > 0, total, later), jnp.where(m > 0, k, of)
            return carry, carry[0]

        def forth(carry: tuple[Array, Array], now: tuple[Array, ...]) -> tuple:
            first, of = carry  # [B] return from the turn's first token on, and its turn
            total, k, m = now
            new = (m > 0) & (k != of)
            carry = jnp.where(new, total, first), jnp.where(new, k, of)
            return carry, carry[0]

        start = (jnp.zeros_like(mask[:, 0]), jnp.full_like(turn[:, 0], -1))
        _, total = jax.lax.scan(back, start, (reward.T, turn.T, mask.T), reverse=True)
        _, credit = jax.lax.scan(forth, start, (total, turn.T, mask.T))
        return batch.replace(advantage=jnp.where(mask > 0, credit.T, 0.0))

    return on_batch(fn, needs=["reward", "turn"], gives=["advantage"], name="turn_returns")


def _check_discount(gamma: float) -> None:
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma={gamma}; a discount lies in [0, 1]")
