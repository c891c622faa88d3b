"""What a model is: its configuration, and one description of its parameters.

A tree of `Param` gives initial values, abstract shapes, shardings and Hugging Face names alike.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rljax import rng

Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained length.

    `linear` divides all by `factor`; `llama3` and `yarn` blend by wavelength (models/layers.py).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = 0.1 ln(factor) + 1


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder; hashable, so that jitted functions can close over it.

    Attributes:
      family: name of a row of `models.families.FAMILIES` (Hugging Face `model_type`).
      vocab_size: rows of the embedding, padding included.
      vocab_used: ids below this are real; the others are never sampled and in no softmax.
      mlp: hidden size of the feed-forward block.
      window: attention window in tokens of the layers that `local` marks.
      local: one flag a layer, True where attention is windowed; () = all global.
      rope_theta_local: rotary base of the local layers where it differs (Gemma 3).
      query_scale: factor on q k^T; None = head_size ** -0.5.
    """

    family: str
    vocab_size: int
    vocab_used: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_theta_local: float | None = None
    rope_scaling: RopeScaling | None = None
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_plus_one: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    activation: Activation = "silu"
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    query_scale: float | None = None
    window: int | None = None
    local: tuple[bool, ...] = ()
    max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads do not divide into {self.kv_heads} key-value heads"
            )
        if self.local and len(self.local) != self.layers:
            raise ValueError(f"`local` has {len(self.local)} flags for {self.layers} layers")
        if any(self.local) and self.window is None:
            raise ValueError("local layers need `window`")
        if not 0 < self.vocab_used <= self.vocab_size:
            raise ValueError(f"vocab_used {self.vocab_used} is not in 1..{self.vocab_size}")

    @property
    def scale(self) -> float:
        """Factor on q k^T."""
        return self.head_size**-0.5 if self.query_scale is None else self.query_scale

    @property
    def groups(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads


@dataclasses.dataclass(frozen=True)
class Param:
    """Describes one parameter: its shape, logical axes, initial values and Hugging Face name.

    Attributes:
      axes: one logical axis a dimension (see sharding/rules.py); None is never sharded.
      scale: standard deviation of the initial normal values; 0.0 = constant `constant`.
      hf: Hugging Face tensor name; "{}" stands for the layer where axes[0] == "layers".
      hf_shape: how to get from the file's array to one layer's: "same", or "linear" (the file has
        [out, in] with out and in flattened; ours is [in..., out...]).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    scale: float = 0.02
    constant: float = 0.0
    hf: str = ""
    hf_shape: Literal["same", "linear"] = "same"
    inputs: int = 1  # "linear": how many leading dimensions (after layers) are inputs


SpecTree = Any  # nested dict of Param
Params = Any  # nested dict of Array


def specs(cfg: ModelConfig) -> SpecTree:
    """The decoder's parameters: nested dict of `Param`, layers stacked on a leading axis."""
    L, D, V = cfg.layers, cfg.width, cfg.vocab_size
    N, K, H, F = cfg.heads, cfg.kv_heads, cfg.head_size, cfg.mlp
    deep = 0.02 / math.sqrt(2 * L)  # residual outputs shrink with depth (GPT-2)
    one = 0.0 if cfg.norm_plus_one else 1.0

    def norm(name: str, size: int = D) -> Param:
        return Param((L, size), ("layers", None), 0.0, one, f"model.layers.{{}}.{name}.weight")

    def linear(name: str, ins: tuple, outs: tuple, axes: tuple, scale: float = 0.02) -> Param:
        return Param(
            (L, *ins, *outs), ("layers", *axes), scale, 0.0, f"model.layers.{{}}.{name}.weight",
            "linear", len(ins),
        )  # fmt: skip

    layers = {
        "attn_norm": norm("input_layernorm"),
        "q": linear("self_attn.q_proj", (D,), (N, H), ("embed", "heads", None)),
        "k": linear("self_attn.k_proj", (D,), (K, H), ("embed", "kv_heads", None)),
        "v": linear("self_attn.v_proj", (D,), (K, H), ("embed", "kv_heads", None)),
        "o": linear("self_attn.o_proj", (N, H), (D,), ("heads", None, "embed"), deep),
        "mlp_norm": norm(
            "pre_feedforward_layernorm" if cfg.post_norms else "post_attention_layernorm"
        ),
        "gate": linear("mlp.gate_proj", (D,), (F,), ("embed", "mlp")),
        "up": linear("mlp.up_proj", (D,), (F,), ("embed", "mlp")),
        "down": linear("mlp.down_proj", (F,), (D,), ("mlp", "embed"), deep),
    }
    if cfg.qkv_bias:
        for name, heads, axis in (("q", N, "heads"), ("k", K, "kv_heads"), ("v", K, "kv_heads")):
            layers[f"{name}_bias"] = Param(
                (L, heads, H), ("layers", axis, None), 0.0, 0.0,
                f"model.layers.{{}}.self_attn.{name}_proj.bias", "linear", 0,
            )  # fmt: skip
    if cfg.qk_norm:
        layers["q_norm"] = norm("self_attn.q_norm", H)
        layers["k_norm"] = norm("self_attn.k_norm", H)
    if cfg.post_norms:
        layers["attn_post_norm"] = norm("post_attention_layernorm")
        layers["mlp_post_norm"] = norm("post_feedforward_layernorm")
    tree: dict[str, Any] = {
        "embed": Param((V, D), ("vocab", "embed"), 0.02, 0.0, "model.embed_tokens.weight"),
        "layers": layers,
        "final_norm": Param((D,), (None,), 0.0, one, "model.norm.weight"),
    }
    if not cfg.tied:
        tree["head"] = Param((V, D), ("vocab", "embed"), 0.02, 0.0, "lm_head.weight")
    return tree


def is_param(x: Any) -> bool:
    """True for a leaf of a spec tree; the `is_leaf` of tree maps over specs."""
    return isinstance(x, Param)


def init(spec: SpecTree, *, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Draws initial values; each parameter has its own key, named by its path."""

    def one(path: tuple, p: Param) -> jax.Array:
        if p.scale == 0.0:
            return jnp.full(p.shape, p.constant, dtype)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return (p.scale * jax.random.normal(rng.fold(key, name), p.shape)).astype(dtype)

    return jax.tree_util.tree_map_with_path(one, spec, is_leaf=is_param)


def abstract(spec: SpecTree, dtype: Any = jnp.float32) -> Any:
    """Shapes and dtypes without values, for lowering, restoring and planning."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), spec, is_leaf=is_param)
