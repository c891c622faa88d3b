"""The key-value cache in two parts: prompts, which several samples may share, and completions.

A block of `share` neighbouring slots has one prompt, whose keys are held and read once; the scores
of the block's queries against them are one matrix product. Completions are held by slot, on CPU in
segments that are read only once a sequence reaches them, because attention there is bound by the
bytes it reads. CPU time of 30 layers at 32 rows, 3 key-value heads of 64, prompts of 64, mean over
128 tokens: one cache of 192 positions 39 ms, segments of 64 31 ms, with prompts shared by 8 26 ms.
A slice of one long cache is no substitute: it is copied, at 3 times the cost of reading all.

On CPU each layer has its own arrays, updated in place. Elsewhere layers are stacked and the cache
is the carry of the scan over layers (as scan inputs and outputs it would be held twice), keys like
values with the head size last. Compiled for v5e:2x4 at 16 layers, 64 slots of 2,048 positions, a
step's temporaries are then 2 MiB a chip; keys transposed cost a second cache, 1,600 MiB, and
positions before heads 130 to 580 MiB.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rljax.kernels import attention
from rljax.models import decoder, spec
from rljax.types import Array, Record

SEGMENT = 64  # positions of the first segment of completions; later ones double the whole


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a cache of B slots.

    Attributes:
      share: slots side by side that share a prompt; divides `slots`.
      prompt: positions of a prompt. completion: positions of a completion.
    """

    slots: int
    share: int
    prompt: int
    completion: int
    form: decoder.Form

    @property
    def blocks(self) -> int:
        """Prompts held."""
        return self.slots // self.share

    @property
    def segments(self) -> tuple[int, ...]:
        """Positions of each segment; one segment where layers are stacked."""
        if self.form == "stacked":
            return (self.completion,)
        sizes: list[int] = []
        while sum(sizes) < self.completion:
            sizes.append(min(max(SEGMENT, sum(sizes)), self.completion - sum(sizes)))
        return tuple(sizes)


class Part(Record):
    """Keys [rows, K, H, n] and values [rows, K, n, H]; both [L, rows, K, n, H] where stacked."""

    keys: Array
    values: Array


class Layer(Record):
    """Cache of one layer, or of all where stacked; rows are blocks in `prompt`, else slots."""

    prompt: Part
    completion: tuple[Part, ...]  # one a segment


Cache = Any  # list of Layer, or one stacked Layer
Prefix = Any  # list of Part, or one stacked Part: the keys and values of prompts, rows in order


def _part(cfg: spec.ModelConfig, rows: int, n: int, form: decoder.Form, dtype: Any) -> Part:
    L, K, H = cfg.layers, cfg.kv_heads, cfg.head_size
    if form == "stacked":
        return Part(*(jnp.zeros((L, rows, K, n, H), dtype) for _ in range(2)))
    return Part(keys=jnp.zeros((rows, K, H, n), dtype), values=jnp.zeros((rows, K, n, H), dtype))


def empty(cfg: spec.ModelConfig, shape: Shape, dtype: Any) -> Cache:
    """A cache of zeros."""

    def layer() -> Layer:
        return Layer(
            prompt=_part(cfg, shape.blocks, shape.prompt, shape.form, dtype),
            completion=tuple(_part(cfg, shape.slots, n, shape.form, dtype) for n in shape.segments),
        )

    return layer() if shape.form == "stacked" else [layer() for _ in range(cfg.layers)]


def empty_prefix(
    cfg: spec.ModelConfig, rows: int, length: int, form: decoder.Form, dtype: Any
) -> Prefix:
    """Room for the keys and values of `rows` prompts."""
    if form == "stacked":
        return _part(cfg, rows, length, form, dtype)
    return [_part(cfg, rows, length, form, dtype) for _ in range(cfg.layers)]


def fill(cfg: spec.ModelConfig) -> decoder.Attend:
    """Attention over whole prompts that leaves their keys and values in the carried prefix."""

    def attend(
        q: Array, k: Array, v: Array, *, layer: Any, window: Any, carry: Prefix
    ) -> tuple[Array, Prefix]:
        out = attention.causal(
            q, k, v, scale=cfg.scale, softcap=cfg.attention_softcap, window=window
        )
        if isinstance(carry, list):
            new = Part(keys=k.transpose(0, 2, 3, 1), values=v.transpose(0, 2, 1, 3))
            new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, carry[layer])
            return out, [*carry[:layer], new, *carry[layer + 1 :]]
        return out, jax.tree.map(
            lambda all_, a: lax.dynamic_update_index_in_dim(all_, a.astype(all_.dtype), layer, 0),
            carry, Part(keys=k.swapaxes(1, 2), values=v.swapaxes(1, 2)),
        )  # fmt: skip

    return attend


def insert(cache: Cache, prefix: Prefix, rows: Array, blocks: Array) -> Cache:
    """Copies prompt rows[i] of the prefix into block blocks[i]; a block past the last does nothing.

    What lies behind a prompt, in its block and in the completions, is masked until overwritten.
    """

    def one(layer: Layer, part: Part, lead: tuple) -> Layer:
        def copy(old: Array, new: Array) -> Array:
            window = tuple(slice(0, n) for n in new.shape[len(lead) + 1 :])
            return old.at[(*lead, blocks, *window)].set(new[(*lead, rows)], mode="drop")

        return layer.replace(prompt=jax.tree.map(copy, layer.prompt, part))

    if isinstance(cache, list):
        return [one(layer, part, ()) for layer, part in zip(cache, prefix, strict=True)]
    return one(cache, prefix, (slice(None),))


def _attend(q: Array, part: Part, seen: Array, softcap: float | None) -> tuple[Array, ...]:
    """Softmax over one part, unfinished: largest score, sum of exponentials, weighted values.

    q [rows, K, g, H] times the scale; seen broadcasts to [rows, K, g, n]. The results are
    [rows, K, g] twice and [rows, K, g, H], float32.
    """

    def product(equation: str, a: Array, b: Array) -> Array:
        return jnp.einsum(
            equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )

    scores = product("bkgh,bkhs->bkgs", q, part.keys.astype(q.dtype))
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, attention.MASKED)
    top = scores.max(-1)
    weights = jnp.exp(scores - top[..., None])
    out = product("bkgs,bksh->bkgh", weights.astype(q.dtype), part.values.astype(q.dtype))
    return top, weights.sum(-1), out


def _join(parts: list[tuple[Array, ...]]) -> Array:
    """One softmax from those of its parts."""
    top = functools.reduce(jnp.maximum, [p[0] for p in parts])
    scales = [jnp.exp(p[0] - top) for p in parts]
    total = sum(p[1] * s for p, s in zip(parts, scales))
    out = sum(p[2] * s[..., None] for p, s in zip(parts, scales))
    return out / total[..., None]  # pyright: ignore[reportIndexIssue, reportOperatorIssue]


def step(
    cfg: spec.ModelConfig, shape: Shape, position: Array, prompt_length: Array, active: Array
) -> decoder.Attend:
    """Attention of one new token a slot: writes its key and value, reads all before it.

    Args:
      position: [B] int32 of the new token. The last prompt token may be fed again: its key is
        already there and is not written.
      prompt_length: [B] int32, at least 1. active: [B] bool; the others' results mean nothing.
    """
    B, share = shape.slots, shape.share
    slots = jnp.arange(B)
    column = position - prompt_length  # [B], of the completion; -1 = the last of the prompt
    furthest = jnp.max(jnp.where(active, column, -1))

    def within(at: Array, window: Any) -> Array:
        """True [B, n] where `at` [n] or [B, n], positions, are seen from the new token."""
        here = position[:, None]
        return at <= here if window is None else (at <= here) & (here - at < window)

    def write(part: Part, start: int, k: Array, v: Array, lead: tuple) -> Part:
        n = part.values.shape[-2]
        at = column - start
        at = jnp.where(at < 0, n, at)  # dropped; negative indices would wrap
        k, v = k.astype(part.keys.dtype), v.astype(part.values.dtype)
        if lead:
            put = (*lead, slots[:, None], jnp.arange(k.shape[1]), at[:, None])
            return Part(
                keys=part.keys.at[put].set(k, mode="drop"),
                values=part.values.at[put].set(v, mode="drop"),
            )
        if B == 1:  # one row is no scatter to XLA, and its update copies the part
            heads = jnp.arange(k.shape[1])
            keys = part.keys[0].at[heads, :, at[0]].set(k[0], mode="drop")
            values = part.values[0].at[heads, at[0]].set(v[0], mode="drop")
            return Part(keys=keys[None], values=values[None])
        return Part(
            keys=part.keys.at[slots, :, :, at].set(k, mode="drop"),
            values=part.values.at[slots, :, at].set(v, mode="drop"),
        )

    def attend(
        q: Array, k: Array, v: Array, *, layer: Any, window: Any, carry: Cache
    ) -> tuple[Array, Cache]:
        N, H, K, R = q.shape[2], q.shape[3], k.shape[2], shape.blocks
        g, k, v = N // K, k[:, 0], v[:, 0]
        stacked = not isinstance(carry, list)
        old, lead = (carry, (layer,)) if stacked else (carry[layer], ())
        starts = [sum(shape.segments[:i]) for i in range(len(shape.segments))]
        completion = tuple(
            write(p, start, k, v, lead) for p, start in zip(old.completion, starts, strict=True)
        )
        new = old.replace(completion=completion)
        carry = new if stacked else [*carry[:layer], new, *carry[layer + 1 :]]

        def one(part: Part) -> Part:
            """The part of this layer, keys [rows, K, H, n] and values [rows, K, n, H]."""
            if not stacked:
                return part
            keys, values = (
                lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
                for x in (part.keys, part.values)
            )
            return Part(keys=keys.swapaxes(2, 3), values=values)

        q = q.reshape(B, K, g, H) * cfg.scale
        # The block's queries side by side: [R, K, share g, H].
        of_block = q.reshape(R, share, K, g, H).swapaxes(1, 2).reshape(R, K, share * g, H)
        at = jnp.arange(shape.prompt)
        seen = (within(at, window) & (at < prompt_length[:, None])).reshape(R, 1, share, 1, -1)
        seen = jnp.broadcast_to(seen, (R, 1, share, g, shape.prompt)).reshape(R, 1, share * g, -1)
        found = _attend(of_block, one(new.prompt), seen, cfg.attention_softcap)
        parts = [
            tuple(
                x.reshape(R, K, share, g, *x.shape[3:])
                .swapaxes(1, 2)
                .reshape(B, K, g, *x.shape[3:])
                for x in found
            )
        ]
        for i, (part, start) in enumerate(zip(completion, starts, strict=True)):
            at = prompt_length[:, None] + start + jnp.arange(shape.segments[i])  # [B, n]
            seen = within(at, window)[:, None, None]

            def read(part: Part, seen: Array = seen) -> tuple[Array, ...]:
                return _attend(q, one(part), seen, cfg.attention_softcap)

            def nothing(part: Part) -> tuple[Array, ...]:
                del part
                zero = jnp.zeros((B, K, g), jnp.float32)
                return zero + attention.MASKED, zero, jnp.zeros((B, K, g, H), jnp.float32)

            parts.append(lax.cond(furthest >= start, read, nothing, part) if start else read(part))
        return _join(parts).reshape(B, 1, N, H), carry

    return attend
