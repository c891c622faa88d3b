"""The key-value cache: position equals index, keys transposed, one array a layer or one for all.

On CPU each layer has its own arrays, updated in place; a slice of one big array would be a copy.
Elsewhere layers are stacked and the cache is the carry of the scan over layers (as scan inputs and
outputs it would be held twice).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from rljax.kernels import attention
from rljax.models import decoder, spec
from rljax.types import Array, Record


class Cache(Record):
    """Keys [B, K, H, S] and values [B, K, S, H]: lists over layers, or arrays with a layer axis."""

    keys: Any
    values: Any

    @property
    def stacked(self) -> bool:
        """Whether layers share one array."""
        return not isinstance(self.keys, list | tuple)


def empty(cfg: spec.ModelConfig, rows: int, length: int, form: decoder.Form, dtype: Any) -> Cache:
    """A cache of zeros for `rows` sequences of `length` positions."""
    K, H, L = cfg.kv_heads, cfg.head_size, cfg.layers
    keys, values = (rows, K, H, length), (rows, K, length, H)
    if form == "stacked":
        return Cache(keys=jnp.zeros((L, *keys), dtype), values=jnp.zeros((L, *values), dtype))
    return Cache(
        keys=[jnp.zeros(keys, dtype) for _ in range(L)],
        values=[jnp.zeros(values, dtype) for _ in range(L)],
    )


def _put(cache: Cache, layer: Any, keys: Array, values: Array) -> Cache:
    """The cache with one layer's arrays replaced."""
    if cache.stacked:
        return Cache(
            keys=lax.dynamic_update_index_in_dim(cache.keys, keys, layer, 0),
            values=lax.dynamic_update_index_in_dim(cache.values, values, layer, 0),
        )
    new_keys, new_values = list(cache.keys), list(cache.values)
    new_keys[layer], new_values[layer] = keys, values
    return Cache(keys=new_keys, values=new_values)


def fill(cfg: spec.ModelConfig) -> decoder.Attend:
    """Attention over whole prompts that leaves their keys and values in the carried cache."""

    def attend(
        q: Array, k: Array, v: Array, *, layer: Any, window: Any, carry: Cache
    ) -> tuple[Array, Cache]:
        out = attention.causal(
            q, k, v, scale=cfg.scale, softcap=cfg.attention_softcap, window=window
        )
        dtype = carry.keys.dtype if carry.stacked else carry.keys[0].dtype
        keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        return out, _put(carry, layer, keys.astype(dtype), values.astype(dtype))

    return attend


def step(cfg: spec.ModelConfig, position: Array) -> decoder.Attend:
    """Attention of one new token a row, at `position` [B]: writes its key and value, reads all."""
    rows = jnp.arange(position.shape[0])

    def attend(
        q: Array, k: Array, v: Array, *, layer: Any, window: Any, carry: Cache
    ) -> tuple[Array, Cache]:
        B, _, N, H = q.shape
        K = k.shape[2]
        k, v = k[:, 0], v[:, 0]  # [B, K, H]
        if carry.stacked:
            dtype = carry.keys.dtype
            all_keys = carry.keys.at[layer, rows, :, :, position].set(k.astype(dtype))
            all_values = carry.values.at[layer, rows, :, position].set(v.astype(dtype))
            carry = Cache(keys=all_keys, values=all_values)
            keys = lax.dynamic_index_in_dim(all_keys, layer, 0, keepdims=False)
            values = lax.dynamic_index_in_dim(all_values, layer, 0, keepdims=False)
        else:
            dtype = carry.keys[layer].dtype
            keys = carry.keys[layer].at[rows, :, :, position].set(k.astype(dtype))
            values = carry.values[layer].at[rows, :, position].set(v.astype(dtype))
            carry = _put(carry, layer, keys, values)
        scores = jnp.einsum(
            "bkgh,bkhs->bkgs", q.reshape(B, K, N // K, H) * cfg.scale, keys.astype(q.dtype),
            precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip
        if cfg.attention_softcap is not None:
            scores = cfg.attention_softcap * jnp.tanh(scores / cfg.attention_softcap)
        at, here = jnp.arange(keys.shape[-1]), position[:, None]
        seen = at <= here if window is None else (at <= here) & (here - at < window)
        scores = jnp.where(seen[:, None, None], scores, attention.MASKED)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        out = jnp.einsum(
            "bkgs,bksh->bkgh", weights.astype(q.dtype), values.astype(q.dtype),
            precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip
        out = out / weights.sum(-1)[..., None]
        return out.reshape(B, 1, N, H), carry

    return attend
