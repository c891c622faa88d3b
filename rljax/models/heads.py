"""The language-model head: whole logits for sampling, log-probs of given tokens for training."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from rljax.kernels import logprob
from rljax.models import layers, spec
from rljax.sharding import rules
from rljax.types import Array


def weight(tree: Any) -> Array:
    """The head's matrix [V, D]: its own, or the embedding where they are tied."""
    return tree["head"] if "head" in tree else tree["embed"]


def logits(
    tree: Any, cfg: spec.ModelConfig, x: Array, precision: layers.Precision = layers.FLOAT32
) -> Array:
    """Logits [..., V] float32 of hidden states [..., D], soft-capped; padded ids at finfo.min."""
    z = lax.dot_general(
        x.astype(precision.products), weight(tree).astype(precision.products),
        (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if precision.products == "float32" else None,
    )  # fmt: skip
    if cfg.logit_softcap is not None:
        z = cfg.logit_softcap * jnp.tanh(z / cfg.logit_softcap)
    if cfg.vocab_used < cfg.vocab_size:
        z = jnp.where(jnp.arange(cfg.vocab_size) < cfg.vocab_used, z, jnp.finfo(z.dtype).min)
    return z


def _shaped(
    tree: Any, cfg: spec.ModelConfig, layout: rules.Layout | None, **settings: Any
) -> tuple[Array, logprob.HeadShape]:
    head, shards = weight(tree), 1
    if layout is not None and layout.mesh.size > 1:
        head = layout.constrain(head, "vocab", None)
        shards = layout.size("vocab")
    shape = logprob.HeadShape(
        vocab_used=cfg.vocab_used, shards=shards, softcap=cfg.logit_softcap, **settings
    )
    return head, shape


def token_statistics(
    tree: Any,
    cfg: spec.ModelConfig,
    x: Array,
    targets: Array,
    *,
    temperature: float | Array = 1.0,
    precision: layers.Precision = layers.FLOAT32,
    entropy_gradient: bool = False,
    sum_squares: bool = False,
    topk_ids: Array | None = None,
    layout: rules.Layout | None = None,
    block: int = 4096,
) -> dict[str, Array]:
    """`kernels.logprob.token_statistics` of hidden states [..., D] and `targets` [...] int32.

    "logp", "entropy" and, where asked for, "sum_squares" are [...]; "topk_logp" is [..., K].
    """
    head, shape = _shaped(
        tree, cfg, layout, block=block, products=precision.products,
        entropy_gradient=entropy_gradient, sum_squares=sum_squares,
    )  # fmt: skip
    ids = None if topk_ids is None else topk_ids.reshape(-1, topk_ids.shape[-1])
    out = logprob.token_statistics(
        x.reshape(-1, x.shape[-1]), head, targets.reshape(-1), shape, temperature, ids
    )
    return {name: v.reshape(*targets.shape, *v.shape[1:]) for name, v in out.items()}


def token_logp(
    tree: Any, cfg: spec.ModelConfig, x: Array, targets: Array, **settings: Any
) -> tuple[Array, Array]:
    """`token_statistics`' log-prob and entropy [...] float32."""
    out = token_statistics(tree, cfg, x, targets, **settings)
    return out["logp"], out["entropy"]


def divergences(
    tree: Any,
    anchor_tree: Any,
    cfg: spec.ModelConfig,
    x: Array,
    anchor_x: Array,
    targets: Array,
    *,
    temperature: float | Array = 1.0,
    precision: layers.Precision = layers.FLOAT32,
    layout: rules.Layout | None = None,
    block: int = 4096,
) -> dict[str, Array]:
    """`kernels.logprob.divergences` [...] from the anchor's distributions to the tree's."""
    settings: Any = {"block": block, "products": precision.products}
    head, shape = _shaped(tree, cfg, layout, **settings)
    anchor_head, _ = _shaped(anchor_tree, cfg, layout, **settings)
    flat, anchor_flat = x.reshape(-1, x.shape[-1]), anchor_x.reshape(-1, x.shape[-1])
    out = logprob.divergences(
        flat, head, anchor_flat, anchor_head, targets.reshape(-1), shape, temperature
    )
    return {name: v.reshape(targets.shape) for name, v in out.items()}
