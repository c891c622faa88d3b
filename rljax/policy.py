"""One handle for people: a model, its tokenizer and a decode engine; load, sample, score, save."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rljax.data.chat import Tokenizer
from rljax.decode import batching, engine
from rljax.models import decoder, gguf, heads, hf, layers, spec
from rljax.sharding import mesh, reshard, rules

Prompt = str | Sequence[dict[str, str]]

MOST_SLOTS = 64  # of an engine that requests alone sized


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How completions are sampled; none of it changes what is sampled, but for `weights`.

    Attributes:
      slots: sequences decoded side by side; None = as many as one request batch has.
      steps_per_call: tokens a device call decodes before finished slots are refilled.
      weights: dtype of the sampler's copy of the parameters.
      topk: likeliest ids recorded with every token (`Completion.topk_ids`); 0 = none.
      mesh: decode mesh over the training mesh's devices, in the same order; its fsdp axis is 1.
    """

    slots: int | None = None
    steps_per_call: int = 16
    weights: Literal["float32", "bfloat16"] = "float32"
    topk: int = 0
    mesh: mesh.MeshConfig = mesh.MeshConfig(data=-1, fsdp=1, tensor=1)


class Policy:
    """A model with its tokenizer. `params` are in the training layout; sampling reshards them.

    Attributes:
      cfg: the model's configuration. params: float32 parameters (`models.spec.specs`).
      version: number stamped on sampled tokens; a trainer sets it to its update count.
    """

    def __init__(
        self,
        cfg: spec.ModelConfig,
        params: Any,
        tokenizer: Tokenizer,
        *,
        layout: rules.Layout | None = None,
        decode: DecodeConfig = DecodeConfig(),
        precision: layers.Precision = layers.FLOAT32,
    ) -> None:
        self.cfg, self.tokenizer, self.precision, self.decode = cfg, tokenizer, precision, decode
        self.layout = layout or rules.single()
        self.update(params)
        self.decode_layout = rules.decode_layout(decode.mesh, self.layout.mesh)
        self._reshard = reshard.make_reshard(
            spec.specs(cfg), self.layout, self.decode_layout, decode.weights
        )
        self._engine: engine.Engine | None = None
        self._tree: Any = None

    def update(self, params: Any, version: int = 0) -> None:
        """Replaces the parameters; the next completion is sampled with them."""
        self.params, self.version, self._tree = params, version, None

    def reserve(
        self, slots: int, prompt_tokens: int, new_tokens: int, share: int = 1
    ) -> engine.Engine:
        """Returns an engine whose slots have room for such requests, building one if need be.

        Args:
          share: neighbouring slots that hold one prompt for samples of one request.
        """
        bucket, room = (-(-n // 16) * 16 for n in (prompt_tokens, new_tokens))
        made = self._engine
        if made is not None and (
            made.cfg.topk == self.decode.topk
            and made.cfg.completion_length >= new_tokens
            and made.cfg.prompt_buckets[-1] >= prompt_tokens
        ):
            return made  # more requests than slots wait their turn
        size = engine.EngineConfig(
            slots=self.decode.slots or slots,
            cache_length=bucket + room,
            prompt_buckets=(bucket,),
            prefill_rows=min(8, slots),
            steps_per_call=self.decode.steps_per_call,
            share=share,
            topk=self.decode.topk,
        )
        self._engine = engine.make_engine(self.cfg, size, self.decode_layout, self.precision)
        self._tree = None
        return self._engine

    def run(self, requests: Sequence[batching.Request]) -> list[list[batching.Completion]]:
        """Completions of each request, in order."""
        made = self.reserve(
            min(sum(r.samples for r in requests), MOST_SLOTS),
            max(len(r.prompt) for r in requests),
            max(r.max_tokens for r in requests),
        )
        if self._tree is None:
            self._tree = made.prepare(self._reshard(self.params))
        flat = batching.generate_all(made, self._tree, requests, version=self.version)
        out, at = [], 0
        for r in requests:
            out.append(flat[at : at + r.samples])
            at += r.samples
        return out

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: through the chat template where the tokenizer has one."""
        if isinstance(prompt, str) and self.tokenizer.template is None:
            return self.tokenizer.encode(prompt)
        return self.tokenizer.chat(messages(prompt))

    def sample(
        self,
        prompt: Prompt,
        *,
        n: int | None = None,
        seed: int | None = None,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        stop: Sequence[str] = (),
    ) -> Any:
        """Returns the text of a completion, or a list of `n` texts.

        Args:
          prompt: a text (one user message, if the model has a chat template) or messages.
          seed: None draws a fresh one; the same seed gives the same text.
          stop: strings that end the completion; tokens that contain one are the last.
        """
        request = batching.Request(
            prompt=self.encode(prompt), samples=n or 1,
            seed=secrets.randbits(31) if seed is None else seed, max_tokens=max_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            stop_ids=self.stop_ids(stop),
        )  # fmt: skip
        texts = [self.tokenizer.decode(c.ids.tolist()) for c in self.run([request])[0]]
        return texts if n is not None else texts[0]

    def stop_ids(self, stop: Sequence[str] = ()) -> tuple[int, ...]:
        """The tokenizer's end ids and every id whose text contains one of the strings."""
        ids = set(self.tokenizer.stop_ids)
        for i in range(self.cfg.vocab_used) if stop else ():
            text = self.tokenizer.decode([i])
            ids |= {i} if any(s in text for s in stop) else set()
        return tuple(sorted(ids))

    def score(
        self, prompt: Prompt, completion: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        """Log-probs [T] float32 of completion ids after the prompt, as the trainer has them."""
        prefix = self.encode(prompt)
        rows = jnp.asarray([prefix]), jnp.asarray([len(prefix)]), jnp.asarray([[list(completion)]])

        @jax.jit
        def logp(params: Any) -> jax.Array:
            tree = decoder.expand(params, self.cfg, decoder.pick_form())
            x = decoder.grouped_hidden(tree, self.cfg, *rows, precision=self.precision)
            return heads.token_logp(tree, self.cfg, x, rows[2], temperature=temperature)[0]

        return np.asarray(logp(self.params))[0, 0]

    def save(self, folder: str | os.PathLike[str], dtype: Any = jnp.float32) -> None:
        """Writes a Hugging Face folder: safetensors, config.json and tokenizer files."""
        hf.save_params(self.params, self.cfg, folder, dtype)
        self.tokenizer.save(folder)


def messages(prompt: Prompt) -> list[dict[str, str]]:
    """A prompt as messages; a text is one message of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt)


def load(
    name: str | os.PathLike[str],
    *,
    layout: rules.Layout | None = None,
    decode: DecodeConfig = DecodeConfig(),
    precision: layers.Precision = layers.FLOAT32,
) -> Policy:
    """Loads a model to sample from and to train.

    Args:
      name: a Hugging Face folder or hub id, a `.gguf` file, "package:NAME" (the GGUF file inside an
        installed Python package), or the directory of a run, whose last checkpoint is taken.

    Raises:
      FileNotFoundError: if there is no such model. ValueError: if its files do not fit together.
    """
    layout = layout or rules.single()
    if (Path(name) / MODEL).is_dir():
        return _load_run(Path(name), layout, decode, precision)
    path = hf.resolve(name)

    def place(name: str, p: spec.Param, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, layout.sharding(p.axes, p.shape, name))

    if path.is_file():
        file = gguf.read(path)
        cfg, tokenizer = gguf.config(file), Tokenizer.from_gguf(file.metadata)
        params = gguf.load_params(file, cfg, place=place)
    else:
        tokenizer = Tokenizer.from_folder(path)
        cfg = hf.load_config(path, vocab_used=tokenizer.vocab_size)
        params = hf.load_params(path, cfg, place=place)
    return Policy(cfg, params, tokenizer, layout=layout, decode=decode, precision=precision)


def scratch(
    cfg: spec.ModelConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    layout: rules.Layout | None = None,
    decode: DecodeConfig = DecodeConfig(),
    precision: layers.Precision = layers.FLOAT32,
) -> Policy:
    """A model with initial values, drawn shard by shard on the layout's devices."""
    layout = layout or rules.single()
    specs = spec.specs(cfg)
    make = jax.jit(lambda key: spec.init(specs, key=key), out_shardings=layout.tree(specs))
    params = make(jax.random.key(seed))
    return Policy(cfg, params, tokenizer, layout=layout, decode=decode, precision=precision)


MODEL = "model"  # folder of a run directory: config.json and tokenizer files
CHECKPOINTS = "checkpoints"


def write_description(policy: Policy, workdir: Path) -> None:
    """Writes what `load` needs beside a checkpoint: the model's config and tokenizer."""
    folder = workdir / MODEL
    folder.mkdir(parents=True, exist_ok=True)
    fields = dataclasses.asdict(policy.cfg)
    (folder / "decoder.json").write_text(json.dumps(fields, indent=2) + "\n")
    policy.tokenizer.save(folder)


def _load_run(
    workdir: Path, layout: rules.Layout, decode: DecodeConfig, precision: layers.Precision
) -> Policy:
    from rljax.checkpoint import Checkpoints  # orbax is slow to import, and most loads need none

    fields = json.loads((workdir / MODEL / "decoder.json").read_text())
    scaling = fields["rope_scaling"]
    fields["rope_scaling"] = spec.RopeScaling(**scaling) if scaling else None
    cfg = spec.ModelConfig(**{**fields, "local": tuple(fields["local"])})
    saved = Checkpoints(workdir / CHECKPOINTS)
    step = saved.latest()
    if step is None:
        raise FileNotFoundError(
            f"{workdir} holds no checkpoint yet; let the run reach its first one, or lower "
            "checkpoint_every"
        )
    specs = spec.specs(cfg)
    like = jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=s),
        specs, layout.tree(specs), is_leaf=spec.is_param,
    )  # fmt: skip
    params = saved.restore_params(step, like)
    tokenizer = Tokenizer.from_folder(workdir / MODEL)
    policy = Policy(cfg, params, tokenizer, layout=layout, decode=decode, precision=precision)
    policy.version = step
    return policy
