"""The decoder: pure functions from a parameter tree and tokens to hidden states.

One block serves every family; switches come from `ModelConfig`. Attention is a function argument,
so the same blocks train on grouped rows, fill a cache, and decode one token a slot.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from rljax.kernels import attention
from rljax.models import layers, spec
from rljax.sharding import rules
from rljax.types import Array

Form = Literal["stacked", "unrolled"]
Remat = Literal["none", "block"]


class Attend(Protocol):
    """Attention of one layer: takes and returns a carry, for instance the key-value cache.

    `layer` is an int in the unrolled form and a traced int32 in the stacked one; `window` is None
    (global), an int, or a traced int32.
    """

    def __call__(
        self, q: Array, k: Array, v: Array, *, layer: Any, window: Any, carry: Any
    ) -> tuple[Array, Any]: ...


def pick_form() -> Form:
    """Unrolled on CPU, where slices of stacked weights are copies; else stacked (compile time)."""
    return "unrolled" if jax.default_backend() == "cpu" else "stacked"


def expand(params: spec.Params, cfg: spec.ModelConfig, form: Form, fuse: bool = False) -> Any:
    """Returns the tree that `hidden` computes on.

    "stacked": the canonical tree. "unrolled": `layers` is a list of per-layer dicts; with `fuse`,
    q, k, v become one matrix `qkv` [D, (N + 2K) H] and gate, up one `gate_up` [D, 2F] (fewer and
    larger products; only for layouts that do not split heads or mlp). Differentiable: the transpose
    of the split is one concatenation a parameter.
    """
    if form == "stacked":
        return params
    L, D = cfg.layers, cfg.width
    split = {
        name: [x.reshape(x.shape[1:]) for x in jax.lax.split(w, (1,) * L)] if L > 1 else [w[0]]
        for name, w in params["layers"].items()
    }
    blocks = [{name: parts[i] for name, parts in split.items()} for i in range(L)]
    if fuse:
        for p in blocks:
            p["qkv"] = jnp.concatenate([p.pop(n).reshape(D, -1) for n in ("q", "k", "v")], 1)
            if cfg.qkv_bias:
                parts = [p.pop(f"{n}_bias").reshape(-1) for n in ("q", "k", "v")]
                p["qkv_bias"] = jnp.concatenate(parts)
            p["gate_up"] = jnp.concatenate([p.pop("gate"), p.pop("up")], 1)
    return {**params, "layers": blocks}


def _project(
    h: Array, p: Any, cfg: spec.ModelConfig, precision: layers.Precision
) -> tuple[Array, Array, Array]:
    """Queries [B,S,N,H], keys and values [B,S,K,H]; with the family's bias and per-head norms."""
    N, K, H = cfg.heads, cfg.kv_heads, cfg.head_size
    if "qkv" in p:
        x = layers.dot(h, p["qkv"], precision)
        if cfg.qkv_bias:
            x = x + p["qkv_bias"].astype(x.dtype)
        x = x.reshape(*x.shape[:-1], N + 2 * K, H)
        q, k, v = x[..., :N, :], x[..., N : N + K, :], x[..., N + K :, :]
    else:
        q, k, v = (layers.dot(h, p[n], precision) for n in ("q", "k", "v"))
        if cfg.qkv_bias:
            q, k, v = (
                x + p[f"{n}_bias"].astype(x.dtype) for x, n in ((q, "q"), (k, "k"), (v, "v"))
            )
    if cfg.qk_norm:
        q = layers.rms_norm(q, p["q_norm"], cfg.norm_eps, cfg.norm_plus_one)
        k = layers.rms_norm(k, p["k_norm"], cfg.norm_eps, cfg.norm_plus_one)
    return q, k, v


def _feed_forward(h: Array, p: Any, cfg: spec.ModelConfig, precision: layers.Precision) -> Array:
    if "gate_up" in p:
        x = layers.dot(h, p["gate_up"], precision)
        gate, up = x[..., : cfg.mlp], x[..., cfg.mlp :]
    else:
        gate, up = (layers.dot(h, p[n], precision) for n in ("gate", "up"))
    return layers.dot(layers.activate(gate, cfg.activation) * up, p["down"], precision)


def hidden(
    tree: Any,
    cfg: spec.ModelConfig,
    tokens: Array,
    positions: Array,
    attend: Attend,
    carry: Any = (),
    *,
    precision: layers.Precision = layers.FLOAT32,
    remat: Remat = "none",
    layout: rules.Layout | None = None,
) -> tuple[Array, Any]:
    """Hidden states after the final norm, and the carry of the last layer.

    Args:
      tree: result of `expand`; its form decides between a Python loop and a scan over layers.
      tokens: [B, S] int32. positions: [B, S] int32, rotary positions.
      attend: attention of one layer, see `Attend`.
      remat: "block" keeps only the input of each block for the backward pass.
      layout: constrains activations on a mesh; None on one device.

    Returns:
      ([B, S, D] in `precision.activations`, carry).
    """
    plus_one = cfg.norm_plus_one
    unrolled = isinstance(tree["layers"], list)
    cos, sin = layers.rope_tables(cfg, positions)
    local = cfg.local or (False,) * cfg.layers

    def pin(x: Array) -> Array:
        return x if layout is None else layout.constrain(x, "batch", None, None)

    def block(
        x: Array, carry: Any, p: Any, layer: Any, kind: Any, window: Any
    ) -> tuple[Array, Any]:
        h = layers.rms_norm(x, p["attn_norm"], cfg.norm_eps, plus_one)
        q, k, v = _project(h, p, cfg, precision)
        q, k = layers.rotate(q, cos[kind], sin[kind]), layers.rotate(k, cos[kind], sin[kind])
        out, carry = attend(q, k, v, layer=layer, window=window, carry=carry)
        out = layers.dot(out.astype(x.dtype), p["o"], precision, inputs=2)
        if cfg.post_norms:
            out = layers.rms_norm(out, p["attn_post_norm"], cfg.norm_eps, plus_one)
        x = pin(x + out)
        out = _feed_forward(
            layers.rms_norm(x, p["mlp_norm"], cfg.norm_eps, plus_one), p, cfg, precision
        )
        if cfg.post_norms:
            out = layers.rms_norm(out, p["mlp_post_norm"], cfg.norm_eps, plus_one)
        return pin(x + out), carry

    embed = tree["embed"]
    if layout is not None:  # whole rows, or the partitioner replicates what it looks up
        embed = layout.constrain(embed, "vocab", None)
    x = embed[tokens].astype(precision.activations)
    if cfg.embed_scale != 1.0:
        x = x * jnp.asarray(cfg.embed_scale, x.dtype)
    x = pin(x)
    if unrolled:
        for i, p in enumerate(tree["layers"]):
            kind, window = (1, cfg.window) if local[i] else (0, None)

            def one(
                x: Array, carry: Any, p: Any, i: int = i, kind: int = kind, window: Any = window
            ) -> Any:
                return block(x, carry, p, i, kind, window)

            x, carry = (jax.checkpoint(one) if remat == "block" else one)(x, carry, p)
    else:
        kinds = jnp.asarray(local, jnp.int32)
        far = jnp.iinfo(jnp.int32).max

        def scanned(state: Any, inputs: Any) -> Any:
            (x, carry), (p, layer, kind) = state, inputs
            window = jnp.where(kind == 1, cfg.window or far, far) if any(local) else None
            return block(x, carry, p, layer, kind if any(local) else 0, window), None

        body = jax.checkpoint(scanned) if remat == "block" else scanned
        (x, carry), _ = jax.lax.scan(
            body, (x, carry), (tree["layers"], jnp.arange(cfg.layers), kinds)
        )
    return layers.rms_norm(x, tree["final_norm"], cfg.norm_eps, plus_one), carry


def causal(cfg: spec.ModelConfig) -> Attend:
    """Attention over whole right-padded sequences, without a cache; the carry passes through."""

    def attend(
        q: Array, k: Array, v: Array, *, layer: Any, window: Any, carry: Any
    ) -> tuple[Array, Any]:
        del layer
        out = attention.causal(
            q, k, v, scale=cfg.scale, softcap=cfg.attention_softcap, window=window
        )
        return out, carry

    return attend


def grouped_hidden(
    tree: Any,
    cfg: spec.ModelConfig,
    prompt: Array,
    prompt_length: Array,
    response: Array,
    **options: Any,
) -> Array:
    """Hidden states that predict the response tokens: [R, G, T, D].

    A row holds one prompt and G responses to it. The prompt's states are computed once and shared
    by the responses' attention; the result is what G separate sequences would give.

    Args:
      prompt: [R, P] int32, right-padded. prompt_length: [R] int32, at least 1.
      response: [R, G, T] int32, right-padded; its padding influences no other position.
      options: as for `hidden`.
    """
    R, P = prompt.shape
    G, T = response.shape[1:]
    tokens = jnp.concatenate([prompt, response.reshape(R, G * T)], 1)  # [R, P + G T]
    at = prompt_length[:, None, None] + jnp.arange(T)  # [R, 1, T]
    at = jnp.broadcast_to(at, (R, G, T)).reshape(R, G * T)
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(P), (R, P)), at], 1)

    def attend(
        q: Array, k: Array, v: Array, *, layer: Any, window: Any, carry: Any
    ) -> tuple[Array, Any]:
        del layer
        out = attention.grouped(
            q, k, v, prompt_length, responses=G, prompt_columns=P,
            scale=cfg.scale, softcap=cfg.attention_softcap, window=window,
        )  # fmt: skip
        return out, carry

    x, _ = hidden(tree, cfg, tokens, positions, attend, **options)
    last = jnp.take_along_axis(x[:, :P], (prompt_length - 1)[:, None, None], 1)  # [R, 1, D]
    last = jnp.broadcast_to(last[:, None], (R, G, 1, x.shape[-1]))
    return jnp.concatenate([last, x[:, P:].reshape(R, G, T, -1)[:, :, :-1]], 2)
