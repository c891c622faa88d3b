"""The decode engine: prefill, insert and generate as pure compiled functions over slots.

The cut is JetStream's (prefill a prompt, insert its cache into a slot, generate for all slots). A
slot's sample depends on its request's seed alone, not on the slot or on its neighbours.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rljax import trees
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
      cache_length: positions a slot has: the largest prompt bucket, the rest for its completion.
      prompt_buckets: padded prompt lengths, ascending; one prefill program each.
      prefill_rows: prompts per prefill call; fewer are padded.
      steps_per_call: most tokens a slot gains in one `generate` call.
      stop_ids: most end ids a request may have.
      share: slots side by side that serve samples of one request and hold its prompt once. A
        request of fewer samples leaves the others of its slots idle.
      banned: ids that are never sampled (placeholders of images); they stay in the full softmax.
      topk: likeliest ids recorded with every token, with their log-probs; 0 = none.
    """

    slots: int
    cache_length: int
    prompt_buckets: tuple[int, ...]
    prefill_rows: int = 1
    steps_per_call: int = 16
    stop_ids: int = 1024
    share: int = 1
    banned: tuple[int, ...] = ()
    topk: int = 0

    def __post_init__(self) -> None:
        if list(self.prompt_buckets) != sorted(set(self.prompt_buckets)) or not self.prompt_buckets:
            raise ValueError(
                f"prompt_buckets {self.prompt_buckets} must be ascending, at least one"
            )
        if self.prompt_buckets[-1] >= self.cache_length:
            raise ValueError(
                f"the largest prompt bucket, {self.prompt_buckets[-1]}, leaves no room for "
                f"completions in cache_length {self.cache_length}; raise cache_length"
            )
        if self.share < 1 or self.slots % self.share:
            raise ValueError(
                f"{self.slots} slots do not divide into blocks of share={self.share}; use a "
                f"multiple of {self.share}"
            )

    @property
    def completion_length(self) -> int:
        """Most tokens of a completion."""
        return self.cache_length - self.prompt_buckets[-1]

    @property
    def blocks(self) -> int:
        """Prompts held at a time."""
        return self.slots // self.share


class Slots(Record):
    """What each slot is doing; all [B] but `stop_ids` [B, n] (padded with -1)."""

    token: Array  # int32, next to be fed, at `position`
    position: Array  # int32
    prompt_length: Array  # int32, positions of the prompt part of the cache in use, at least 1
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
    topk_ids: Array | None = None  # [steps, B, K] int32, -1 = empty; None with topk off
    topk_logp: Array | None = None  # [steps, B, K] float32, in the distribution sampled from


@dataclasses.dataclass(frozen=True)
class Engine:
    """Compiled functions of one model and size.

    Attributes:
      prepare: canonical params in the decode layout -> the tree that the others take.
      init_state: () -> State, all slots idle.
      prefill: (tree, tokens [rows, bucket], length [rows]) -> Prefix, the prompts' keys and values.
      insert: (state, prefix, rows [R], blocks [R], Slots) -> State. Puts prefix row rows[i] into
        block blocks[i], and rows i * share ... of the Slots into its slots; blocks[i] = R (the
        number of blocks) does nothing.
      generate: (tree, state, enough) -> (State, Result). Stops after `steps_per_call` tokens, or
        as soon as `enough` blocks are idle.
      traces: how often each function was traced, by name.
    """

    model: spec.ModelConfig
    cfg: EngineConfig
    prepare: Callable[[Any], Any]
    init_state: Callable[[], State]
    prefill: Callable[[Any, Any, Any], caches.Prefix]
    insert: Callable[[State, caches.Prefix, Any, Any, Slots], State]
    generate: Callable[[Any, State, Any], tuple[State, Result]]
    traces: collections.Counter[str]


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def idle(cfg: EngineConfig) -> Slots:
    """Slots that do nothing."""
    zero = jnp.zeros(cfg.slots, jnp.int32)
    real = jnp.zeros(cfg.slots, jnp.float32)
    return Slots(
        token=zero, position=zero, prompt_length=zero + 1, index=zero, limit=zero,
        active=jnp.zeros(cfg.slots, bool), seed=zero.astype(jnp.uint32), sample=zero,
        stop_ids=jnp.full((cfg.slots, cfg.stop_ids), -1, jnp.int32),
        sampling=sampling.Sampling(temperature=real + 1, top_k=zero, top_p=real + 1, min_p=real),
    )  # fmt: skip


def prepare(
    params: Any,
    model: spec.ModelConfig,
    form: decoder.Form,
    fuse: bool,
    precision: layers.Precision,
) -> Any:
    """The tree of a decode step, from the canonical parameters.

    The matrices are cast once to the dtype of the products. The head stays [V, D], the embedding
    itself where tied: a transposed copy is no faster. A step with transposed weights, or with the
    weights as the left operand, was within 5% at 1, 8, 32 and 128 rows.
    """
    if precision.products != "float32":
        blocks = params["layers"]
        cast = trees.cast({name: blocks[name] for name in MATRICES}, precision.products)
        head = trees.cast(heads.weight(params), precision.products)
        params = {**params, "layers": {**blocks, **cast}, "head": head}
    return decoder.expand(params, model, form, fuse)


def make_engine(
    model: spec.ModelConfig,
    cfg: EngineConfig,
    layout: rules.Layout,
    precision: layers.Precision = layers.FLOAT32,
    form: decoder.Form | None = None,
) -> Engine:
    """Compiles an engine for a decode layout (`sharding.rules.DECODE_RULES` on a decode mesh)."""
    form = form or decoder.pick_form()
    if cfg.slots < 4 and jax.default_backend() == "cpu":  # bfloat16 is slower there than float32
        precision = dataclasses.replace(precision, products="float32")
    fuse = layout.size("heads") == layout.size("mlp") == 1
    dtype = jnp.dtype(precision.activations)
    shape = caches.Shape(
        slots=cfg.slots, share=cfg.share, prompt=cfg.prompt_buckets[-1],
        completion=cfg.completion_length, form=form,
    )  # fmt: skip
    traces: collections.Counter[str] = collections.Counter()
    allowed = None
    if cfg.banned:
        allowed = jnp.ones(model.vocab_size, bool).at[jnp.asarray(cfg.banned)].set(False)

    def sharded(like: Any) -> Any:
        """Shardings of a cache or prefix; a part whose rows do not divide stays whole."""

        stacked = form == "stacked"

        def one(x: Any) -> Any:
            rows = "batch" if x.shape[int(stacked)] % layout.size("batch") == 0 else None
            return layout.sharding(
                (*(("layers",) if stacked else ()), rows, "kv_heads", None, None)
            )

        return jax.tree.map(one, like)

    def init_state() -> State:
        return State(cache=caches.empty(model, shape, dtype), slots=idle(cfg))

    empty = jax.eval_shape(init_state)
    state_sharding = State(
        cache=sharded(empty.cache), slots=jax.tree.map(lambda _: layout.replicated, empty.slots)
    )

    def prefill(tree: Any, tokens: Array, length: Array) -> caches.Prefix:
        traces["prefill"] += 1
        del length  # padding comes after the prompt: causal attention never lets it in
        rows, bucket = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(bucket), tokens.shape)
        prefix = caches.empty_prefix(model, rows, bucket, form, dtype)
        _, prefix = decoder.hidden(
            tree, model, tokens, positions, caches.fill(model), prefix, precision=precision
        )
        return lax.with_sharding_constraint(prefix, sharded(prefix))

    def insert(
        state: State, prefix: caches.Prefix, rows: Array, blocks: Array, new: Slots
    ) -> State:
        traces["insert"] += 1
        slots = (blocks[:, None] * cfg.share + jnp.arange(cfg.share)).reshape(-1)
        return State(
            cache=caches.insert(state.cache, prefix, rows, blocks),
            slots=jax.tree.map(lambda a, b: a.at[slots].set(b, mode="drop"), state.slots, new),
        )

    def one_token(tree: Any, state: State, u: Array) -> tuple[State, tuple]:
        s = state.slots
        x, cache = decoder.hidden(
            tree, model, s.token[:, None], s.position[:, None],
            caches.step(model, shape, s.position, s.prompt_length, s.active), state.cache,
            precision=precision,
        )  # fmt: skip
        logits = heads.logits(tree, model, x[:, 0], precision)
        token, logp, full = sampling.sample(logits, u, s.sampling, allowed)
        top = sampling.likeliest(logits, s.sampling, cfg.topk, allowed) if cfg.topk else ()
        stopped = jnp.any(token[:, None] == s.stop_ids, -1) | (s.index + 1 >= s.limit)
        going = s.active & ~stopped
        moved = s.replace(
            token=jnp.where(s.active, token, s.token),
            position=jnp.where(going, s.position + 1, s.position),
            index=jnp.where(s.active, s.index + 1, s.index),
            active=going,
        )
        return State(cache=cache, slots=moved), (token, logp, full, s.active, *top)

    def generate(tree: Any, state: State, enough: Array) -> tuple[State, Result]:
        traces["generate"] += 1
        steps = (cfg.steps_per_call, cfg.slots)
        real = jnp.zeros(steps, jnp.float32)
        out = (jnp.zeros(steps, jnp.int32), real, real, jnp.zeros(steps, bool))
        if cfg.topk:
            slots = (*steps, cfg.topk)
            out = (*out, jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.float32))
        # Every row gains one token a step, so the numbers of all steps are known beforehand.
        s = state.slots
        u = jax.vmap(lambda i: sampling.uniform(s.seed, s.sample, s.index + i))(
            jnp.arange(cfg.steps_per_call)
        )

        def more(carry: Any) -> Array:
            i, state, _ = carry
            busy = jnp.any(state.slots.active.reshape(cfg.blocks, cfg.share), -1)
            return (i < cfg.steps_per_call) & (jnp.sum(~busy) < enough)

        def body(carry: Any) -> Any:
            i, state, out = carry
            state, new = one_token(tree, state, u[i])
            out = tuple(lax.dynamic_update_index_in_dim(a, b, i, 0) for a, b in zip(out, new))
            return i + 1, state, out

        _, state, out = lax.while_loop(more, body, (jnp.int32(0), state, out))
        names = ("token", "logp", "logp_full", "valid", "topk_ids", "topk_logp")
        arrays: Any = dict(zip(names, out))
        return state, Result(**arrays, active=state.slots.active)

    return Engine(
        model=model,
        cfg=cfg,
        prepare=jax.jit(lambda params: prepare(params, model, form, fuse, precision)),
        init_state=jax.jit(init_state, out_shardings=state_sharding),
        prefill=jax.jit(prefill),
        insert=jax.jit(insert, donate_argnums=0, out_shardings=state_sharding),
        generate=jax.jit(
            generate, donate_argnums=1, out_shardings=(state_sharding, layout.replicated)
        ),
        traces=traces,
    )
