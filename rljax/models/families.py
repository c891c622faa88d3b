"""Model families: how a Hugging Face `config.json` becomes a `ModelConfig`, and back.

A row of `FAMILIES` says what sets a family apart; there is one decoder. Every field of the file is
either read, known to leave the computation alone, or refused by name: a field that is dropped in
silence gives wrong logits without an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from rljax.models import spec


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a family apart from Llama.

    Attributes:
      architecture: class of transformers that computes it.
      switches: fields of `ModelConfig` that the family fixes.
      head_size: head size where config.json is silent; None = width / heads.
      tied: whether the head is the embedding where config.json is silent.
      windows: which layers attend within a window: "none", "all" (where one is set), "last" (from
        layer `max_window_layers` on), "alternate" (every other), "pattern" (all but every n-th).
    """

    architecture: str
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    head_size: int | None = None
    tied: bool = False
    windows: Literal["none", "all", "last", "alternate", "pattern"] = "none"


_GEMMA = {"norm_plus_one": True, "activation": "gelu_tanh"}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, windows="last"),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, head_size=128, windows="last"),
    "gemma": Family("GemmaForCausalLM", _GEMMA, head_size=256, tied=True),
    "gemma2": Family(
        "Gemma2ForCausalLM", {**_GEMMA, "post_norms": True},
        head_size=256, tied=True, windows="alternate",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", {**_GEMMA, "post_norms": True, "qk_norm": True},
        head_size=256, tied=True, windows="pattern",
    ),
}  # fmt: skip

# Fields that name files, versions, token ids, initial values or generation defaults.
IGNORED = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "_from_model_config", "_name_or_path", "architectures", "attn_implementation",
    "bad_words_ids", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "do_sample", "dtype", "early_stopping", "eos_token_id", "finetuning_task", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "is_llama_config", "label2id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "pad_token_id",
    "prefix", "pretraining_tp", "problem_type", "repetition_penalty", "return_dict",
    "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_cache",
})  # fmt: skip

_REQUIRED = object()
_LAYER_KINDS = {"full_attention": False, "sliding_attention": True}


class _Fields:
    """The fields of one config.json, remembering which were read."""

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        self.config, self.what, self.read = dict(config), what, {"model_type"}

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        self.read.add(name)
        value = self.config.get(name, default)
        if value is _REQUIRED:
            raise ValueError(
                f"{self.what} lacks the field {name!r}; take it from the model's original files"
            )
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Reads a field that may only say what the family computes (the first value if absent)."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{self.what} says {name}={value!r}, which rljax does not compute "
                f"(it knows {' or '.join(repr(a) for a in allowed)}); use another model"
            )

    def finish(self) -> None:
        unknown = sorted(set(self.config) - self.read - IGNORED)
        if unknown:
            raise ValueError(
                f"{self.what} has fields that rljax does not know: {', '.join(unknown)}; each may "
                "change the computation, so delete from the file those that do not"
            )


def from_hf(config: Mapping[str, Any], vocab_used: int | None = None) -> spec.ModelConfig:
    """ModelConfig of a Hugging Face `config.json` (the fields of transformers 4 and 5).

    Args:
      config: the parsed file.
      vocab_used: number of ids the tokenizer has, where the embedding is padded beyond them.

    Raises:
      ValueError: naming a missing field, an unknown one, or one with a value that is not computed.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"model_type {name!r} is not known; use a model of type {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    f = _Fields(config, f"config.json of a {name} model")
    width, heads = int(f.take("hidden_size")), int(f.take("num_attention_heads"))
    layers, positions = int(f.take("num_hidden_layers")), int(f.take("max_position_embeddings"))
    head_size = f.take("head_dim", family.head_size) or width // heads
    kv_heads = f.take("num_key_value_heads", heads if name == "llama" else _REQUIRED) or heads
    f.expect("attention_dropout", 0.0, None)
    if name.startswith("gemma"):
        f.expect(
            "hidden_act", "gelu_pytorch_tanh", "gelu", None
        )  # "gelu" means tanh: transformers#29402
        f.expect("hidden_activation", "gelu_pytorch_tanh", *([None] if name == "gemma" else []))
        f.expect("use_bidirectional_attention", None, False)
    else:
        f.expect("hidden_act", "silu")
    if name != "qwen2":
        f.expect("attention_bias", False)
    if name == "qwen2":
        f.expect("use_mrope", False)
    if name == "llama":
        f.expect("mlp_bias", False)
        f.expect("rope_interleaved", False)
    extra: dict[str, Any] = dict(family.switches)
    if name.startswith("gemma"):
        extra["embed_scale"] = math.sqrt(width)
    if name in ("gemma2", "gemma3_text"):
        scalar = f.take("query_pre_attn_scalar", 256)
        extra["query_scale"] = None if scalar == head_size else scalar**-0.5
        capped = name == "gemma2"
        if capped:
            extra["attention_softcap"] = f.take("attn_logit_softcapping", 50.0)
        else:
            f.expect("attn_logit_softcapping", None)  # transformers reads and then ignores it
        extra["logit_softcap"] = f.take("final_logit_softcapping", 30.0 if capped else None)
    extra["window"], extra["local"] = _windows(f, family, layers)
    theta, theta_local, scaling = _rope(f, name, positions)
    vocab_size = int(f.take("vocab_size"))
    cfg = spec.ModelConfig(
        family=name,
        vocab_size=vocab_size,
        vocab_used=min(vocab_size, vocab_used or vocab_size),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=int(kv_heads),
        head_size=int(head_size),
        mlp=int(f.take("intermediate_size")),
        norm_eps=float(f.take("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_theta_local=theta_local,
        rope_scaling=scaling,
        tied=bool(f.take("tie_word_embeddings", family.tied)),
        max_positions=positions,
        **extra,
    )
    f.finish()
    return cfg


def _windows(f: _Fields, family: Family, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Window in tokens and one flag a layer; (None, ()) where every layer is global."""
    if family.windows == "none":
        return None, ()
    window = f.take("sliding_window", 4096)
    if family.windows == "all":
        return (None, ()) if window is None else (window, (True,) * layers)
    kinds = f.take("layer_types", None)
    if family.windows == "last":
        first = f.take("max_window_layers", 28)
        if not f.take("use_sliding_window", False):
            window = None
        local = tuple(window is not None and i >= first for i in range(layers))
    elif family.windows == "alternate":
        local = tuple(i % 2 == 0 for i in range(layers))
    else:
        private = f.take("_sliding_window_pattern", 6)
        every = f.take("sliding_window_pattern", private)
        local = tuple(bool((i + 1) % every) for i in range(layers))
    if kinds is not None:
        if len(kinds) != layers or not set(kinds) <= set(_LAYER_KINDS):
            raise ValueError(
                f"{f.what}: layer_types must be {layers} of {list(_LAYER_KINDS)}, found {kinds}"
            )
        local = tuple(_LAYER_KINDS[k] for k in kinds)
    if not any(local):
        return None, ()
    return window, local


def _rope(
    f: _Fields, name: str, positions: int
) -> tuple[float, float | None, spec.RopeScaling | None]:
    """Rotary base, that of local layers where it differs, and the scaling of global ones."""
    old = f.take("rope_scaling", None)  # transformers 4
    new = f.take("rope_parameters", None)  # transformers 5
    f.expect("partial_rotary_factor", 1.0, None)
    theta = f.take("rope_theta", None)
    if name != "gemma3_text":
        if old and new and old != new:
            raise ValueError(
                f"{f.what} has both rope_scaling and rope_parameters, and they differ; delete one"
            )
        given = dict(old or new or {})
        theta = given.pop("rope_theta", None) or theta or 10_000.0
        return float(theta), None, _scaling(given, positions, f.what)
    new = new or {}
    far, near = dict(new.get("full_attention") or {}), dict(new.get("sliding_attention") or {})
    if set(new) - set(_LAYER_KINDS):
        raise ValueError(
            f"{f.what}: rope_parameters must be by {list(_LAYER_KINDS)}, found {list(new)}"
        )
    far.update(old or {})
    theta = far.pop("rope_theta", None) or theta or 1_000_000.0
    base = f.take("rope_local_base_freq", None)
    local = near.pop("rope_theta", None) or base or 10_000.0
    if _scaling(near, positions, f.what) is not None:
        raise ValueError(
            f"{f.what} scales rotary positions of sliding_attention; rljax does not compute that"
        )
    return float(theta), float(local), _scaling(far, positions, f.what)


def _scaling(given: dict[str, Any], positions: int, what: str) -> spec.RopeScaling | None:
    """RopeScaling of a `rope_scaling` dict without its base; its keys must all be understood."""
    given = {k: v for k, v in given.items() if v is not None}

    def number(key: str, default: float | None = None) -> float:
        value = given.pop(key, default)
        if value is None:
            raise ValueError(
                f"{what} has {kind} rotary scaling without {key!r}; see the model's original files"
            )
        return float(value)

    kind, old_kind = given.pop("rope_type", None), given.pop("type", None)
    kind = kind or old_kind or "default"
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{what} has partial_rotary_factor; rljax rotates whole heads only")
    scaling = None
    if kind == "linear":
        scaling = spec.RopeScaling("linear", number("factor"))
    elif kind == "llama3":
        scaling = spec.RopeScaling(
            "llama3",
            factor=number("factor"),
            original_positions=int(number("original_max_position_embeddings", positions)),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    elif kind == "yarn":
        original = int(number("original_max_position_embeddings", positions))
        factor = number("factor", positions / original)
        numerator, denominator = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        attention = given.pop("attention_factor", None)
        if attention is None and numerator and denominator:
            attention = _mscale(factor, numerator) / _mscale(factor, denominator)
        if not given.pop("truncate", True):
            raise ValueError(
                f"{what} has yarn scaling with truncate=false, which rljax does not compute"
            )
        scaling = spec.RopeScaling(
            "yarn",
            factor=factor,
            original_positions=original,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=attention,
        )
    elif kind != "default":
        raise ValueError(
            f"{what} has rotary scaling {kind!r}; rljax knows default, linear, llama3 and yarn"
        )
    if given:
        raise ValueError(
            f"{what} has fields that {kind!r} rotary scaling does not know: {sorted(given)}"
        )
    return scaling


def _mscale(factor: float, weight: float) -> float:
    """Attention temperature of yarn, 0.1 m ln(factor) + 1 (arXiv 2309.00071 eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def to_hf(cfg: spec.ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model, in fields that transformers 4 and 5 both load.

    `vocab_used` has no field there: a loader learns it from the tokenizer.

    Raises:
      ValueError: if the config has switches that its family cannot state.
    """
    if cfg.family not in FAMILIES:
        raise ValueError(
            f"family {cfg.family!r} is not one of {', '.join(FAMILIES)}; export needs one of these"
        )
    family, gemma = FAMILIES[cfg.family], cfg.family.startswith("gemma")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.width,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_size,
        "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
        "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None if cfg.rope_scaling is None else to_hf_scaling(cfg.rope_scaling),
    }
    if cfg.family != "qwen2":
        config["attention_bias"] = False
    if cfg.family == "llama":
        config["mlp_bias"] = False
    if gemma:
        config["hidden_activation"] = "gelu_pytorch_tanh"
    if cfg.family in ("gemma2", "gemma3_text"):
        scalar = cfg.scale**-2
        config["query_pre_attn_scalar"] = (
            round(scalar) if math.isclose(scalar, round(scalar)) else scalar
        )
        config["attn_logit_softcapping"] = cfg.attention_softcap
        config["final_logit_softcapping"] = cfg.logit_softcap
    if cfg.family == "gemma3_text":
        config["rope_local_base_freq"] = cfg.rope_theta_local
    if family.windows != "none":
        config["sliding_window"] = cfg.window
        if family.windows != "all":
            local = cfg.local or (False,) * cfg.layers
            config["layer_types"] = [list(_LAYER_KINDS)[flag] for flag in local]
        if family.windows == "last":
            config["use_sliding_window"] = any(cfg.local)
            config["max_window_layers"] = cfg.local.index(True) if any(cfg.local) else cfg.layers
    again = from_hf(config, cfg.vocab_used)
    lost = [k for k, v in vars(again).items() if v != getattr(cfg, k)]
    if lost:
        raise ValueError(
            f"a {cfg.family} model cannot have "
            + ", ".join(f"{k}={getattr(cfg, k)!r} (it has {getattr(again, k)!r})" for k in lost)
            + "; change these fields, or the family"
        )
    return config


def to_hf_scaling(scaling: spec.RopeScaling) -> dict[str, Any]:
    """The `rope_scaling` field of a config.json."""
    out: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        out["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        out |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.kind == "yarn":
        out |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            out["attention_factor"] = scaling.attention_factor
    return out


def with_vocab(cfg: spec.ModelConfig, tokenizer_size: int) -> spec.ModelConfig:
    """The config with the tokenizer's number of ids; rows of the embedding beyond are padding."""
    return dataclasses.replace(cfg, vocab_used=min(cfg.vocab_size, tokenizer_size))
