"""The decode engine: prefill, insert and generate as pure compiled functions over slots.

The cut is JetStream's (prefill a prompt, insert its cache into a slot, generate for all slots). A
slot's sample depends on its request's seed alone, not on the slot or on its neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rljax.decode import cache as caches
from rljax.decode import sampling
from rljax.models import decoder, heads, layers, spec
from rljax.sharding import rules
from rljax.types import Array, Record


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static sizes.

    Attributes:
      slots: sequences decoded side by side.
      cache_length: positions a slot holds, prompt and completion together.
      prompt_buckets: padded prompt lengths, ascending; one prefill program each.
      prefill_rows: prompts per prefill call.
      steps_per_call: most tokens a slot gains in one `generate` call.
      stop_ids: most end ids a request may have.
    """

    slots: int
    cache_length: int
    prompt_buckets: tuple[int, ...]
    prefill_rows: int = 1
    steps_per_call: int = 16
    stop_ids: int = 1024

    def __post_init__(self) -> None:
        if list(self.prompt_buckets) != sorted(set(self.prompt_buckets)) or not self.prompt_buckets:
            raise ValueError(
                f"prompt_buckets {self.prompt_buckets} must be ascending, at least one"
            )
        if self.prompt_buckets[-1] > self.cache_length:
            raise ValueError(
                f"the largest prompt bucket, {self.prompt_buckets[-1]}, is longer than cache_length "
                f"{self.cache_length}; raise cache_length"
            )


class Slots(Record):
    """What each slot is doing; all [B] but `stop_ids` [B, n] (padded with -1)."""

    token: Array  # int32, next to be fed, at `position`
    position: Array  # int32
    index: Array  # int32, tokens sampled so far
    limit: Array  # int32, most tokens to sample
    active: Array  # bool
    seed: Array  # uint32, of the request
    sample: Array  # int32, which of the request's samples
    stop_ids: Array  # int32
    sampling: sampling.Sampling


class State(Record):
    """The engine's state: the cache and the slots. `insert` and `generate` donate it."""

    cache: caches.Cache
    slots: Slots


class Result(Record):
    """Tokens of one `generate` call, [steps, B]; entries where `valid` is False mean nothing."""

    token: Array  # int32
    logp: Array  # float32, under the distribution sampled from
    logp_full: Array  # float32, under the full softmax at temperature 1
    valid: Array  # bool
    active: Array  # [B] bool, slots that go on


@dataclasses.dataclass(frozen=True)
class Engine:
    """Compiled functions of one model and size.

    Attributes:
      prepare: canonical params in the decode layout -> the tree that the others take.
      init_state: () -> State, all slots idle.
      prefill: (tree, tokens [rows, bucket], length [rows]) -> Cache of the prompts.
      insert: (state, prefix cache, rows [B], slots [B], Slots) -> State. Copies prefix row rows[i]
        into slot slots[i] and replaces its Slots fields by row i; slots[i] = B does nothing.
      generate: (tree, state) -> (State, Result).
    """

    model: spec.ModelConfig
    cfg: EngineConfig
    prepare: Callable[[Any], Any]
    init_state: Callable[[], State]
    prefill: Callable[[Any, Array, Array], caches.Cache]
    insert: Callable[[State, caches.Cache, Array, Array, Slots], State]
    generate: Callable[[Any, State], tuple[State, Result]]


def idle(cfg: EngineConfig) -> Slots:
    """Slots that do nothing."""
    zero = jnp.zeros(cfg.slots, jnp.int32)
    real = jnp.zeros(cfg.slots, jnp.float32)
    return Slots(
        token=zero, position=zero, index=zero, limit=zero,
        active=jnp.zeros(cfg.slots, bool), seed=zero.astype(jnp.uint32), sample=zero,
        stop_ids=jnp.full((cfg.slots, cfg.stop_ids), -1, jnp.int32),
        sampling=sampling.Sampling(temperature=real + 1, top_k=zero, top_p=real + 1, min_p=real),
    )  # fmt: skip


def make_engine(
    model: spec.ModelConfig,
    cfg: EngineConfig,
    layout: rules.Layout,
    precision: layers.Precision = layers.FLOAT32,
    form: decoder.Form | None = None,
) -> Engine:
    """Compiles an engine for a decode layout (`sharding.rules.DECODE_RULES` on a decode mesh)."""
    form = form or decoder.pick_form()
    fuse = layout.size("heads") == layout.size("mlp") == 1
    dtype = jnp.dtype(precision.activations)

    def cache_sharding(rows: int, length: int) -> Any:
        axes: tuple = ("batch", "kv_heads", None, None)
        axes = ("layers", *axes) if form == "stacked" else axes
        like = jax.eval_shape(lambda: caches.empty(model, rows, length, form, dtype))
        split = rows % layout.size("batch") == 0  # a short prefill batch stays whole
        axes = axes if split else tuple(None if a == "batch" else a for a in axes)
        return jax.tree.map(lambda _: layout.sharding(axes), like)

    state_sharding = State(
        cache=cache_sharding(cfg.slots, cfg.cache_length),
        slots=jax.tree.map(lambda _: layout.replicated, jax.eval_shape(lambda: idle(cfg))),
    )

    @jax.jit
    def prepare(params: Any) -> Any:
        tree = decoder.expand(params, model, form, fuse)
        if form == "unrolled" and fuse:  # the head is read row by row at each step: [D, V]
            tree = {**tree, "head_t": heads.weight(tree).T}
        return tree

    def init_state() -> State:
        return State(
            cache=caches.empty(model, cfg.slots, cfg.cache_length, form, dtype), slots=idle(cfg)
        )

    def prefill(tree: Any, tokens: Array, length: Array) -> caches.Cache:
        del length  # padding comes after the prompt: causal attention never lets it in
        rows, bucket = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(bucket), tokens.shape)
        empty = caches.empty(model, rows, bucket, form, dtype)
        _, filled = decoder.hidden(
            tree, model, tokens, positions, caches.fill(model), empty, precision=precision
        )
        return jax.lax.with_sharding_constraint(filled, cache_sharding(rows, bucket))

    def insert(state: State, prefix: caches.Cache, rows: Array, slots: Array, new: Slots) -> State:
        def copy(old: Array, part: Array) -> Array:
            lead = (slice(None),) if form == "stacked" else ()
            # Only the prefix's positions: what lies behind them is masked until it is overwritten.
            window = tuple(slice(0, n) for n in part.shape[len(lead) + 1 :])
            return old.at[(*lead, slots, *window)].set(part[(*lead, rows)], mode="drop")

        return State(
            cache=jax.tree.map(copy, state.cache, prefix),
            slots=jax.tree.map(lambda a, b: a.at[slots].set(b, mode="drop"), state.slots, new),
        )

    def one_token(tree: Any, state: State) -> tuple[State, tuple]:
        s = state.slots
        x, cache = decoder.hidden(
            tree, model, s.token[:, None], s.position[:, None],
            caches.step(model, s.position), state.cache, precision=precision,
        )  # fmt: skip
        logits = heads.logits(tree, model, x[:, 0], precision)
        u = sampling.uniform(s.seed, s.sample, s.index)
        token, logp, full = sampling.sample(logits, u, s.sampling)
        stopped = jnp.any(token[:, None] == s.stop_ids, -1) | (s.index + 1 >= s.limit)
        going = s.active & ~stopped
        moved = s.replace(
            token=jnp.where(s.active, token, s.token),
            position=jnp.where(going, s.position + 1, s.position),
            index=jnp.where(s.active, s.index + 1, s.index),
            active=going,
        )
        return State(cache=cache, slots=moved), (token, logp, full, s.active)

    def generate(tree: Any, state: State) -> tuple[State, Result]:
        shape = (cfg.steps_per_call, cfg.slots)
        real = jnp.zeros(shape, jnp.float32)
        out = (jnp.zeros(shape, jnp.int32), real, real, jnp.zeros(shape, bool))

        def more(carry: Any) -> Array:
            i, state, _ = carry
            return (i < cfg.steps_per_call) & jnp.any(state.slots.active)

        def body(carry: Any) -> Any:
            i, state, out = carry
            state, new = one_token(tree, state)
            out = tuple(lax.dynamic_update_index_in_dim(a, b, i, 0) for a, b in zip(out, new))
            return i + 1, state, out

        _, state, out = lax.while_loop(more, body, (jnp.int32(0), state, out))
        return state, Result(*out, active=state.slots.active)

    everywhere = layout.replicated
    return Engine(
        model=model,
        cfg=cfg,
        prepare=prepare,
        init_state=jax.jit(init_state, out_shardings=state_sharding),
        prefill=jax.jit(prefill),
        insert=jax.jit(insert, donate_argnums=0, out_shardings=state_sharding),
        generate=jax.jit(generate, donate_argnums=1, out_shardings=(state_sharding, everywhere)),
    )
