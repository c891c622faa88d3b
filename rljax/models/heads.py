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


def token_logp(
    tree: Any,
    cfg: spec.ModelConfig,
    x: Array,
    targets: Array,
    *,
    temperature: float | Array = 1.0,
    precision: layers.Precision = layers.FLOAT32,
    entropy_gradient: bool = False,
    layout: rules.Layout | None = None,
    block: int = 4096,
) -> tuple[Array, Array]:
    """Log-prob and entropy [...] float32 of `targets` [...] int32 from hidden states [..., D]."""
    head = weight(tree)
    shards = 1
    if layout is not None and layout.mesh.size > 1:
        head = layout.constrain(head, "vocab", None)
        shards = layout.size("vocab")
    shape = logprob.HeadShape(
        vocab_used=cfg.vocab_used, block=block, shards=shards, softcap=cfg.logit_softcap,
        products=precision.products, entropy_gradient=entropy_gradient,
    )  # fmt: skip
    flat = x.reshape(-1, x.shape[-1])
    logp, entropy = logprob.token_logp(flat, head, targets.reshape(-1), shape, temperature)
    return logp.reshape(targets.shape), entropy.reshape(targets.shape)
