"""The normal form of a policy loss, and the transforms and chains that fill it in.

Per token

    loss_t = - sg(weight_t * keep_t) * A_t * g_t + extra_t,      value = sum_t w_t * loss_t

where `g` (live) starts as log pi and is rewritten by ratio and surrogate members, `keep` and
`weight` are constants, `extra` (live) collects regularisers, and w_t (`Batch.weight`, denominators
included) is fixed by the one aggregate on the full batch. So any cut of the batch between sequences
sums to the whole, in value and in gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from rljax.types import Array, Metric, Record

State = Any


class Batch(Record):
    """What a loss knows of B responses of up to T tokens, one sequence per row.

    Entry t of every [B, T] array concerns response token t. A microbatch is a slice of every leaf
    of a prepared batch. What lies under mask 0 is never read, NaN or not.
    """

    mask: Array  # [B, T] float32, 1.0 on tokens the policy wrote and trains on
    reward: Array | None = None  # [B]; not finite = none came, the response is not trained on
    token_reward: Array | None = None  # [B, T], read by members that compute returns
    group: Array | None = None  # [B] int32, any id that rows of one prompt share
    length: Array | None = None  # [B] response lengths in tokens, trained on or not
    truncated: Array | None = None  # [B] 1.0 where the response hit the token limit
    advantage: Array | None = None  # [B, T], written by an advantage member or given
    weight: Array | None = None  # [B, T] final weight of each token, written by the aggregate
    logp_sampler: Array | None = None  # [B, T] as the decode engine sampled the token
    logp_old: Array | None = None  # [B, T] by the trainer before this batch's first update
    logp_ref: Array | None = None  # [B, T] by the frozen reference
    token: Array | None = None  # [B, T] int32 ids of the response tokens
    topk_ids: Array | None = None  # [B, T, K] int32 likeliest ids of the sampler, -1 = empty slot
    topk_logp: Array | None = None  # [B, T, K] log-probs of topk_ids as the token was sampled
    chosen: Array | None = None  # [B, T] 1.0 on tokens a member picked, written by it in prepare
    value: Array | None = None  # [B, T] by the critic before the update, expected return from t on
    value_target: Array | None = None  # [B, T] what the critic learns, written by a returns member
    turn: Array | None = None  # [B, T] int32 number of the turn that a token belongs to, from 0
    role: Array | None = None  # [B] int32 role that the policy played in the response, from 0
    budget_score: Array | None = None  # [B, S] mean score where the response is cut at budget s


class Terms(Record):
    """The parts of the per-token loss while a chain builds it; float32, all [B, T]."""

    logp: Array  # live log pi of the sampled token, 0 where not trained on
    log_ratio: Array  # live, 0 until a ratio member writes it
    g: Array  # live, log pi until a ratio or surrogate member rewrites it
    weight: Array  # constant factor of the policy term, from corrections
    keep: Array  # constant 0/1 factor of the policy term, from trust regions
    extra: Array  # live, added per token
    live: dict[str, Array]  # what the model's head emits beside logp, by name: "entropy"
    metrics: dict[str, Metric]

    def measured(self, name: str, values: Array, weights: Array) -> Terms:
        """Returns the terms with one more metric, without gradient."""
        metric = jax.lax.stop_gradient(Metric.of(values, weights))
        return self.replace(metrics={**self.metrics, name: metric})


@dataclasses.dataclass(frozen=True)
class LossTransform:
    """One member of a loss: three pure functions and the names they read and write.

    A chain is a LossTransform too; called, it is the loss:

        batch, state = loss.prepare(batch, loss.init(batch))     # once per full batch
        value, metrics = loss(logp, batch, state, entropy=...)   # per microbatch, differentiable

    Attributes:
      init: batch -> state; () for most. State is a pytree of arrays.
      prepare: (batch, state) -> (batch, state), on the raw full batch, outside the gradient.
      update: (terms, batch, state) -> terms, inside the gradient, on any microbatch.
      needs: what it reads: names of Batch fields, of live arrays ("entropy"), "ratio" where a ratio
        member must come first, "group>n" where n responses per prompt make it void.
      gives: what it writes for later members: "ratio", "advantage", "weight", "mask".
      name: how messages call it.
      members: the members of a chain, in order; () for a single transform.
    """

    init: Callable[[Batch], State] = lambda batch: ()
    prepare: Callable[[Batch, State], tuple[Batch, State]] = lambda batch, state: (batch, state)
    update: Callable[[Terms, Batch, State], Terms] = lambda terms, batch, state: terms
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()
    name: str = "custom"
    members: tuple[LossTransform, ...] = ()

    def __call__(
        self, logp: Array, batch: Batch, state: State, **live: Array
    ) -> tuple[Array, dict[str, Metric]]:
        """Returns (value, metrics) of a prepared batch or of a slice of its rows.

        Tokens whose log-prob is not finite, live or in a field the loss reads, are left out of the
        sum but stay in its denominator; the metric tokens/nonfinite counts them.

        Args:
          logp: [B, T] live log-probs of the sampled tokens.
          batch: as `prepare` returned it.
          state: as `prepare` returned it.
          live: the other arrays of the head that `needs` names, [B, T] or [B, T, ...].
        """
        if not self.members:
            return chain(self)(logp, batch, (state,), **live)
        if logp.shape != batch.mask.shape:
            raise ValueError(
                f"logp has shape {logp.shape} and the mask {batch.mask.shape}; "
                "both are [B, T], entry t for response token t"
            )
        for member in self.members:
            _check_needs(member, batch, live)
        _check_complete(self, batch)
        logp = logp.astype(jnp.promote_types(logp.dtype, jnp.float32))
        batch = jax.lax.stop_gradient(batch)
        ok = _usable(self, logp, batch)
        count = batch.mask
        batch = _select(ok, batch)
        logp = jnp.where(ok, logp, 0.0)
        terms = Terms(
            logp=logp,
            log_ratio=jnp.zeros_like(logp),
            g=logp,
            weight=jnp.ones_like(logp),
            keep=jnp.ones_like(logp),
            extra=jnp.zeros_like(logp),
            live={name: _where(ok, x) for name, x in live.items()},
            metrics={},
        ).measured("tokens/nonfinite", 1.0 - batch.mask, count)
        terms = self.update(terms, batch, state)
        factor = jax.lax.stop_gradient(terms.weight * terms.keep)
        assert batch.weight is not None and batch.advantage is not None
        per_token = jnp.where(ok, -factor * batch.advantage * terms.g + terms.extra, 0.0)
        return jnp.sum(batch.weight * per_token), terms.metrics


def chain(*members: LossTransform) -> LossTransform:
    """Joins transforms in order; chains inside are unrolled, their members keep their names.

    Raises:
      ValueError: where a member stands before the one it needs, or two write the same thing.
    """
    for place, member in enumerate(members):
        if not isinstance(member, LossTransform):
            hint = getattr(member, "__name__", "")
            advice = f"call it: {hint}(...)" if hint else "wrap a function by on_terms or on_batch"
            raise TypeError(f"member {place} of the chain is not a LossTransform; {advice}")
    flat = tuple(m for member in members for m in member.members or (member,))
    _check_order(flat)
    needs, given = set[str](), set[str]()
    for member in flat:
        needs |= member.needs - given
        given |= member.gives
    if "weight" in given and "advantage" not in given:
        needs.add("advantage")  # the normal form reads it

    def init(batch: Batch) -> State:
        return tuple(m.init(batch) for m in flat)

    def prepare(batch: Batch, state: State) -> tuple[Batch, State]:
        _check_ratio(whole)
        ok = batch.mask > 0
        if "reward" in needs and batch.reward is not None:
            ok &= jnp.isfinite(batch.reward)[:, None]
        batch = _select(ok, batch.replace(weight=None))
        after = []
        for member, before in zip(flat, state, strict=True):
            _check_needs(member, batch, None)
            batch, own = member.prepare(batch, before)
            after.append(own)
        _check_complete(whole, batch)
        return batch, tuple(after)

    def update(terms: Terms, batch: Batch, state: State) -> Terms:
        for member, own in zip(flat, state, strict=True):
            terms = member.update(terms, batch, own)
        return terms

    name = f"chain({', '.join(m.name for m in flat)})"
    whole = LossTransform(
        init, prepare, update, frozenset(needs - {"mask"}), frozenset(given), name, flat
    )
    return whole


def on_terms(
    fn: Callable[[Terms, Batch], Terms],
    *,
    needs: Iterable[str] = (),
    gives: Iterable[str] = (),
    name: str = "",
) -> LossTransform:
    """Makes a transform of a function (terms, batch) -> terms, run inside the gradient.

    The name in messages is the enclosing maker's, so `soft_gate(4.0)` is called soft_gate.
    """
    return LossTransform(
        update=lambda terms, batch, state: fn(terms, batch),
        needs=frozenset(needs),
        gives=frozenset(gives),
        name=name or _maker(fn),
    )


def on_batch(
    fn: Callable[[Batch], Batch],
    *,
    needs: Iterable[str] = (),
    gives: Iterable[str] = (),
    name: str = "",
) -> LossTransform:
    """Makes a transform of a function batch -> batch, run once on the full batch."""
    return LossTransform(
        prepare=lambda batch, state: (fn(batch), state),
        needs=frozenset(needs),
        gives=frozenset(gives),
        name=name or _maker(fn),
    )


def check_groups(loss: LossTransform, group_size: int) -> None:
    """Raises where the loss compares responses of one prompt but each prompt has too few.

    Members say so by "group>1", or a larger number, in `needs`; recipes ask before the run starts.

    Args:
      group_size: responses per prompt.
    """
    for member in loss.members or (loss,):
        least = max([int(n[6:]) for n in member.needs if n.startswith("group>")], default=0)
        if group_size > least:
            continue
        has = "one response" if group_size == 1 else f"{group_size} responses"
        raise ValueError(
            f"{member.name} compares the responses of one prompt; with {has} there is nothing to "
            f"compare and the advantage is 0 everywhere; set the group size to {least + 1} or "
            "more, or choose a loss without a group (reinforce, reinforce_pp)"
        )


def is_mark(need: str) -> bool:
    """True for what stands in `needs`, yet is neither a Batch field nor a live array."""
    return need == "ratio" or need.startswith("group>")


SUPPLY = {
    "advantage": "put an advantage member (group_centre(), leave_one_out(), ...) before it, "
    "or fill Batch.advantage",
    "weight": "end the chain with one aggregate: token_mean(), sequence_mean_token_mean(), ...",
    "ratio": "put token_ratio(), sequence_ratio() or geometric_ratio() before it "
    '(a ratio of your own declares gives={"ratio"})',
    "reward": "fill Batch.reward, one number per response",
    "group": "fill Batch.group with an id per response that the responses of one prompt share",
    "length": "fill Batch.length with response lengths in tokens",
    "truncated": "fill Batch.truncated with 1.0 where a response hit the token limit",
    "logp_sampler": "fill Batch.logp_sampler with the log-probs that the decode engine recorded",
    "logp_old": "fill Batch.logp_old: score the batch with the parameters before the update",
    "logp_ref": "fill Batch.logp_ref: score the batch with the reference parameters",
    "token": "fill Batch.token with the ids of the response tokens",
    "topk_ids": "fill Batch.topk_ids with the sampler's likeliest ids, [B, T, K]",
    "topk_logp": "fill Batch.topk_logp with the sampler's log-probs of topk_ids, [B, T, K]",
    "topk_logp_live": "pass topk_logp_live=..., [B, T, K]: the trainer's log-probs at topk_ids",
    "sum_squares": "pass sum_squares=..., [B, T]: sum over the vocabulary of pi^2",
    **dict.fromkeys(
        ("full_kl", "full_tv", "full_kl_dot", "full_tv_dot"),
        "pass it, [B, T], from kernels.logprob.divergences; a train step does, given the anchor",
    ),
    "value": "fill Batch.value with the critic's values of the batch",
    "value_target": "put a returns member (gae(), monte_carlo()) before it",
    "value_live": "pass value_live=..., [B, T]: the critic's values that carry a gradient",
    "turn": "fill Batch.turn with the turn that each token belongs to",
    "budget_score": "fill Batch.budget_score with the score of each response cut at each budget",
    "role": "fill Batch.role with an id per response of the role that the policy played",
    "entropy": "pass entropy=..., [B, T], as the score or train step returns it",
}


def _maker(fn: Callable) -> str:
    """Name of the function that made `fn`, or its own at the top of a module."""
    path = getattr(fn, "__qualname__", "").split(".")
    names = [n for n in path if n not in ("<locals>", "<lambda>", "fn", "")]
    return names[-1] if names else "custom"


def _lack(member: str, need: str) -> ValueError:
    advice = SUPPLY.get(need, f"fill Batch.{need}" if hasattr(Batch, need) else f"pass {need}=...")
    return ValueError(f"{member} needs `{need}`, which nothing before it provides; {advice}")


def _check_order(members: tuple[LossTransform, ...]) -> None:
    writer: dict[str, str] = {}
    for place, member in enumerate(members):
        for need in sorted(member.needs - member.gives - set(writer)):
            later = [m.name for m in members[place + 1 :] if need in m.gives]
            if later:
                raise ValueError(
                    f"{member.name} reads the {need} that {later[0]} writes, but stands before it; "
                    f"move {later[0]} before {member.name}"
                )
        for thing in sorted(member.gives):
            if thing in writer and thing not in member.needs:
                raise ValueError(
                    f"{writer[thing]} and {member.name} both write the {thing}; keep one of them"
                )
            writer[thing] = member.name


def _check_ratio(whole: LossTransform) -> None:
    if "ratio" in whole.needs:
        raise _lack(next(m.name for m in whole.members if "ratio" in m.needs), "ratio")


def _check_needs(member: LossTransform, batch: Batch, live: dict[str, Array] | None) -> None:
    """Checks Batch fields, and live arrays unless `live` is None (they come with the call)."""
    for need in sorted(n for n in member.needs if not is_mark(n)):
        absent = need not in live if live is not None else False
        if getattr(batch, need) is None if hasattr(batch, need) else absent:
            raise _lack(member.name, need)


def _check_complete(whole: LossTransform, batch: Batch) -> None:
    _check_ratio(whole)
    if batch.weight is None:
        if "weight" in whole.gives:
            raise ValueError(
                f"{whole.name} got a batch that was not prepared; "
                "call batch, state = loss.prepare(batch, loss.init(batch)) first"
            )
        raise ValueError(f"{whole.name} has no aggregate; {SUPPLY['weight']}")
    if batch.advantage is None:
        raise _lack(whole.name, "advantage")


def _usable(whole: LossTransform, logp: Array, batch: Batch) -> Array:
    """[B, T] bool: trained on, and every log-prob the loss reads is finite."""
    ok = (batch.mask > 0) & jnp.isfinite(logp)
    for name in sorted(whole.needs):
        if name.startswith("logp_") and hasattr(batch, name):
            ok &= jnp.isfinite(getattr(batch, name))
    return ok


def _where(ok: Array, x: Array) -> Array:
    """x [B, T, ...] with 0 where not ok [B, T]."""
    return jnp.where(ok.reshape(ok.shape + (1,) * (x.ndim - 2)), x, 0)


def _select(ok: Array, batch: Batch) -> Batch:
    """The batch with mask = ok and every other [B, T, ...] entry 0 outside it.

    Done before any exp or log, so that neither value nor gradient can meet 0 * inf.
    """
    leaves = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}  # pyright: ignore
    del leaves["mask"], leaves["budget_score"]  # [B, S]
    tokens = {n: _where(ok, x) for n, x in leaves.items() if getattr(x, "ndim", 0) >= 2}
    return batch.replace(mask=ok.astype(jnp.float32), **tokens)
