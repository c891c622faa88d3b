"""GGUF files (llama.cpp's format), versions 2 and 3: metadata and dequantised tensors, in NumPy.

`read` parses a file, `config` and `load_params` turn it into a model; the tokenizer in its metadata
is `data.chat.Tokenizer.from_gguf`'s. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md;
blocks: ggml's ggml-quants.c. Three things differ from Hugging Face files and are undone here: the
rotary pairs of q and k are interleaved in Llama files, Gemma's norms hold weight + 1, and Llama 3's
rotary scaling is a tensor of factors.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import re
import struct
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from rljax.models import families, hf, layers, spec

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: shape as NumPy has it (GGUF lists it reversed), kind, bytes."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclasses.dataclass(frozen=True)
class File:
    """A parsed GGUF file; tensors are dequantised when asked for."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    data: np.ndarray  # the whole file, uint8, memory-mapped

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor as [blocks, bytes of a block]."""
        t = self.tensors[name]
        if t.kind not in KINDS:
            known = ", ".join(k.name for k in KINDS.values())
            raise ValueError(
                f"tensor {name} of {self.path} is of quantisation kind {t.kind}, which rljax does "
                f"not read; it reads {known}: take a file of one of these"
            )
        kind = KINDS[t.kind]
        blocks = math.prod(t.shape) // kind.weights
        if t.shape and t.shape[-1] % kind.weights:
            raise ValueError(
                f"tensor {name} of {self.path} has rows of part of a {kind.name} block"
            )
        end = t.start + blocks * kind.bytes
        if end > self.data.size:
            raise ValueError(f"{self.path} was cut short: tensor {name} is missing; fetch it again")
        return self.data[t.start : end].reshape(blocks, kind.bytes)

    def tensor(self, name: str) -> np.ndarray:
        """A tensor in float32."""
        raw = self.raw(name)
        return KINDS[self.tensors[name].kind].dequantise(raw).reshape(self.tensors[name].shape)


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.at = buffer, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.buffer, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        start = self.at + 8
        self.at = start + int.from_bytes(self.buffer[self.at : start], "little")
        return self.buffer[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, n = self.scalar("<I"), self.scalar("<Q")
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(n)]
        dtype = np.dtype(_SCALARS[inner].replace("?", "B"))
        self.at += n * dtype.itemsize
        return np.frombuffer(self.buffer, dtype, n, self.at - n * dtype.itemsize)


def read(path: str | os.PathLike[str]) -> File:
    """Parses the header of a GGUF file: all metadata, and where each tensor lies."""
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no GGUF file at {path}")
    with open(path, "rb") as f:
        if f.read(4) != b"GGUF":
            raise ValueError(
                f"{path} does not start with GGUF; it is no GGUF file, or a damaged one"
            )
        buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    c = _Cursor(buffer)
    c.at = 4
    try:
        version, tensors, pairs = c.scalar("<I"), c.scalar("<Q"), c.scalar("<Q")
        if version not in (2, 3):
            raise ValueError(
                f"{path} is GGUF version {version}; rljax reads 2 and 3 (little endian)"
            )
        metadata = {}
        for _ in range(pairs):
            key = c.string()
            metadata[key] = c.value(c.scalar("<I"))
        found = []
        for _ in range(tensors):
            name, dims = c.string(), c.scalar("<I")
            shape = tuple(c.scalar("<Q") for _ in range(dims))[::-1]
            found.append((name, shape, c.scalar("<I"), c.scalar("<Q")))
    except (struct.error, KeyError) as error:
        raise ValueError(f"the header of {path} is damaged or cut short; fetch it again") from error
    align = int(metadata.get("general.alignment", 32))
    base = -(-c.at // align) * align
    return File(
        path=path,
        metadata=metadata,
        tensors={name: Tensor(shape, kind, base + at) for name, shape, kind, at in found},
        data=np.frombuffer(buffer, np.uint8),
    )


def _half(raw: np.ndarray) -> np.ndarray:
    """Two bytes of each block as float16, in float32 [blocks, 1]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """[blocks, n] bytes to [blocks, 2 n] float32: the low halves, then the high halves."""
    n = raw.shape[1]
    out = np.empty((raw.shape[0], 2 * n), np.float32)
    out[:, :n] = raw & 15
    out[:, n:] = raw >> 4
    return out


def _q4_0(raw: np.ndarray) -> np.ndarray:
    out = _nibbles(raw[:, 2:])
    out -= 8
    out *= _half(raw[:, :2])
    return out


def _q4_1(raw: np.ndarray) -> np.ndarray:
    out = _nibbles(raw[:, 4:])
    out *= _half(raw[:, :2])
    out += _half(raw[:, 2:4])
    return out


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """[blocks, 4] bytes to their 32 bits, worth 16 each, in float32 [blocks, 32]."""
    bits = np.unpackbits(raw, axis=1, bitorder="little")
    return bits.astype(np.float32) * 16


def _q5_0(raw: np.ndarray) -> np.ndarray:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 6:]) + _fifth_bits(raw[:, 2:6]) - 16)


def _q5_1(raw: np.ndarray) -> np.ndarray:
    q = _nibbles(raw[:, 8:]) + _fifth_bits(raw[:, 4:8])
    return _half(raw[:, :2]) * q + _half(raw[:, 2:4])


def _q8_0(raw: np.ndarray) -> np.ndarray:
    out = raw[:, 2:].view(np.int8).astype(np.float32)
    out *= _half(raw[:, :2])
    return out


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima [blocks, 8, 1] of Q4_K and Q5_K: f16 factors times six bits each.

    Bytes 0-3 and 4-7 hold the low six bits of scales and minima 0-3 and, above, two bits of 4-7;
    bytes 8-11 hold the low four bits of scales 4-7 (low half) and of minima 4-7 (high half).
    """
    low, mid, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], 1)
    least = np.concatenate([mid & 63, (high >> 4) | (mid >> 2 & 48)], 1)
    scales = _half(raw[:, :2]) * scale.astype(np.float32)
    minima = _half(raw[:, 2:4]) * least.astype(np.float32)
    return scales[..., None], minima[..., None]


def _q4_k(raw: np.ndarray) -> np.ndarray:
    scale, least = _k_scales(raw)
    q = _nibbles(raw[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32)
    return (scale * q - least).reshape(-1, 256)


def _q5_k(raw: np.ndarray) -> np.ndarray:
    scale, least = _k_scales(raw)
    bits = raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [blocks, 8, 32]
    q = _nibbles(raw[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32) + bits.astype(np.float32) * 16
    return (scale * q - least).reshape(-1, 256)


def _q6_k(raw: np.ndarray) -> np.ndarray:
    # each half of a block: 64 bytes of low nibbles (32 + 32), 32 bytes of two high bits
    low = _nibbles(raw[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    q = (low + high.astype(np.float32) * 16 - 32).reshape(-1, 16, 16)
    scale = _half(raw[:, 208:]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[..., None] * q).reshape(-1, 256)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to store weights: how many a block holds, in how many bytes."""

    name: str
    weights: int
    bytes: int
    dequantise: Callable[[np.ndarray], np.ndarray]


KINDS = {
    0: Kind("F32", 1, 4, lambda raw: raw.view("<f4").astype(np.float32)),
    1: Kind("F16", 1, 2, lambda raw: raw.view("<f2").astype(np.float32)),
    30: Kind("BF16", 1, 2, lambda raw: raw.view(ml_dtypes.bfloat16).astype(np.float32)),
    2: Kind("Q4_0", 32, 18, _q4_0),
    3: Kind("Q4_1", 32, 20, _q4_1),
    6: Kind("Q5_0", 32, 22, _q5_0),
    7: Kind("Q5_1", 32, 24, _q5_1),
    8: Kind("Q8_0", 32, 34, _q8_0),
    12: Kind("Q4_K", 256, 144, _q4_k),
    13: Kind("Q5_K", 256, 176, _q5_k),
    14: Kind("Q6_K", 256, 210, _q6_k),
}

_FAMILY = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}  # fmt: skip

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def config(file: File | str | os.PathLike[str]) -> spec.ModelConfig:
    """ModelConfig of a GGUF file; metadata that is not understood is refused by name."""
    f = file if isinstance(file, File) else read(file)
    arch = f.metadata.get("general.architecture")
    if arch not in _FAMILY:
        raise ValueError(
            f"{f.path} holds a model of architecture {arch!r}; rljax reads {', '.join(_FAMILY)}"
        )
    given = {
        k.removeprefix(f"{arch}."): v for k, v in f.metadata.items() if k.startswith(f"{arch}.")
    }
    out: dict[str, Any] = {"model_type": _FAMILY[arch]}
    for key, field in _FIELDS.items():
        if key in given:
            value = given.pop(key)
            if not np.isscalar(value):
                raise ValueError(
                    f"{f.path} has one {arch}.{key} a layer; rljax wants the same in all"
                )
            # shortest decimal of the float32: 1e-05, not 9.999999747378752e-06
            out[field] = float(str(np.float32(value))) if isinstance(value, float) else value
    heads = out.get("num_attention_heads", 1)
    out.setdefault("num_key_value_heads", heads)
    head_size = out.setdefault("head_dim", out.get("hidden_size", 0) // heads)
    for key, value in (
        ("attention.value_length", head_size),
        ("rope.dimension_count", head_size),
        ("attention.causal", True),
        ("expert_count", 0),
        ("rope.scaling.finetuned", given.get("rope.scaling.finetuned")),
    ):
        if given.pop(key, value) != value:
            raise ValueError(
                f"{f.path} says {arch}.{key} is not {value}; rljax does not compute that"
            )
    embedding = f.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{f.path} has no tensor token_embd.weight; is it a whole language model?")
    given.pop("vocab_size", None)
    out["vocab_size"] = embedding.shape[0]
    out["tie_word_embeddings"] = _tied(f)
    if arch == "llama" and "sliding_window" in out:
        out["model_type"] = "mistral"
    if arch in ("gemma2", "gemma3"):
        # llama.cpp scales by the head size except in the 27B models, which it knows by their depth
        large = out.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[arch]
        scale = given.pop("attention.scale", None)
        scalar = out["hidden_size"] // heads if large else head_size
        out["query_pre_attn_scalar"] = scalar if scale is None else scale**-2
    if arch == "gemma3":
        out["sliding_window_pattern"] = given.pop("attention.sliding_window_pattern", 6)
    out["rope_scaling"] = _rope_scaling(f, given, out)
    if given:
        raise ValueError(
            f"{f.path} has metadata that rljax does not know and that may change the computation: "
            + ", ".join(f"{arch}.{key}" for key in sorted(given))
        )
    return families.from_hf(out, used_tokens(f.metadata))


def used_tokens(metadata: dict[str, Any]) -> int | None:
    """Ids up to the last that is not padding of the embedding ("[PAD151665]"); None if unknown."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    n = len(tokens)
    while n > 1 and re.fullmatch(r"\[PAD\d+\]", tokens[n - 1]):
        n -= 1
    return n


def _tied(f: File) -> bool:
    """True where the head is the embedding: absent, or the same bytes once more."""
    if "output.weight" not in f.tensors:
        return True
    head, embedding = f.tensors["output.weight"], f.tensors["token_embd.weight"]
    if (head.kind, head.shape) != (embedding.kind, embedding.shape):
        return False
    return np.array_equal(f.raw("output.weight"), f.raw("token_embd.weight"))


def _rope_scaling(f: File, given: dict[str, Any], out: dict[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` field, from metadata (linear, yarn) or the factors of Llama 3."""
    kind = given.pop("rope.scaling.type", "none")
    old = given.pop("rope.scale_linear", 1.0)
    factor = given.pop("rope.scaling.factor", old)
    original = given.pop("rope.scaling.original_context_length", None)
    if kind == "none" and old != 1.0:
        kind = "linear"
    if "rope_freqs.weight" in f.tensors:
        return _llama3(f, out)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{f.path} has rotary scaling {kind!r}; rljax knows linear, yarn and llama3"
        )
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3(f: File, out: dict[str, Any]) -> dict[str, Any] | None:
    """Finds the scaling whose divisors of the frequencies are the file's rope_freqs tensor.

    The file keeps the divisors only; they are checked against those of Llama 3.1 to 3.3 (bounds 1
    and 4 of an original length of 8192), whose factor is the largest divisor.
    """
    divisors = f.tensor("rope_freqs.weight")
    factor = float(divisors.max())
    if factor == 1.0:
        return None
    scaling = spec.RopeScaling("llama3", factor, original_positions=8192)
    theta, size = out.get("rope_theta", 10_000.0), out["head_dim"]
    plain, _ = layers.rope_frequencies(size, theta, None)
    scaled, _ = layers.rope_frequencies(size, theta, scaling)
    if divisors.shape != plain.shape or not np.allclose(plain / scaled, divisors, rtol=1e-4):
        raise ValueError(
            f"{f.path} scales rotary positions by a tensor rope_freqs.weight that is not that of "
            "Llama 3; use the model's Hugging Face folder instead"
        )
    return families.to_hf_scaling(scaling)


def load_params(
    file: File | str | os.PathLike[str],
    cfg: spec.ModelConfig | None = None,
    dtype: Any = jnp.float32,
    place: hf.Place | None = None,
) -> spec.Params:
    """Parameters of a GGUF file, dequantised, as the tree of `spec.specs(cfg)`.

    Args:
      cfg: `config(file)` if None.
      place: as for `hf.load_params`.

    Raises:
      ValueError: naming a tensor that is missing, unused, of another shape, or of an unknown kind.
    """
    f = file if isinstance(file, File) else read(file)
    cfg = config(f) if cfg is None else cfg
    names = {_hf_name(name, cfg): name for name in f.tensors if name != "rope_freqs.weight"}
    if cfg.tied:
        names.pop("lm_head.weight", None)  # equal to the embedding: `config` compared them
    heads = {"attn_q.weight": cfg.heads, "attn_k.weight": cfg.kv_heads}
    interleaved = f.metadata.get("general.architecture") == "llama"

    def read_tensor(key: str) -> np.ndarray:
        name = names[key]
        x = f.tensor(name)
        part = name.split(".", 2)[-1]
        if interleaved and part in heads:
            x = x.reshape(heads[part], -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        if cfg.norm_plus_one and key.endswith("norm.weight"):
            x = x - 1.0
        return x

    shapes = {key: f.tensors[name].shape for key, name in names.items()}
    for name in names.values():
        f.raw(name)  # an unknown kind or a short file is found before the work
    return hf.fill(cfg, shapes, read_tensor, dtype, place)


def _hf_name(name: str, cfg: spec.ModelConfig) -> str:
    """Hugging Face name of a tensor; the file's own name where there is none."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    table = _TENSORS | _POST_NORMS if cfg.post_norms else _TENSORS
    if not match or match[2] not in table:
        return name
    return f"model.layers.{match[1]}.{table[match[2]]}.{match[3]}"
