"""Supervised fine-tuning: raises the log-prob of given completions after their prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax import metrics, progress, provenance
from rljax import policy as policies
from rljax.data import prompts as sources
from rljax.losses import algorithms, base
from rljax.models import decoder, layers
from rljax.recipes import workdir as runs
from rljax.sharding import mesh, rules
from rljax.train import optimiser as optimisers
from rljax.train import step as steps
from rljax.train.state import Sequences


@dataclasses.dataclass(frozen=True)
class Pair:
    """One example: a prompt as text or messages, and the completion to learn, as text."""

    prompt: str | Sequence[dict[str, str]]
    completion: str
    uid: int = 0


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
      model: what `rljax.load` takes, or a function that makes a Policy.
      pairs: the examples, or a function that makes them.
      batch: examples per update. max_tokens: longest completion, its end token included.
      checkpoint_every: updates between checkpoints; 0 = at the end only.
    """

    model: str | Callable[[], policies.Policy]
    pairs: Sequence[Pair] | Callable[[], Sequence[Pair]]
    steps: int = 100
    batch: int = 32
    microbatches: int = 1
    max_tokens: int = 128
    optimiser: optimisers.OptimiserConfig = optimisers.OptimiserConfig(lr=1e-5)
    mesh: mesh.MeshConfig = mesh.MeshConfig()
    precision: layers.Precision = layers.FLOAT32
    remat: decoder.Remat = "none"
    seed: int = 0
    checkpoint_every: int = 0
    tensorboard: bool = False


def encode(
    policy: policies.Policy, pairs: Sequence[Pair], max_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Ids of prompt and completion of each pair; the completion ends with the model's end token.

    Raises:
      ValueError: if there is no pair, a completion is longer than `max_tokens`, or the chat
        template does not begin an answered prompt as it does a prompt.
    """
    if not pairs:
        raise ValueError("there are no examples to train on; give at least one Pair")
    tokenizer, rows = policy.tokenizer, []
    for place, pair in enumerate(pairs):
        if tokenizer.template is None:
            prompt = policy.encode(pair.prompt)
            completion = tokenizer.extend([], pair.completion)
            completion += [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        else:
            asked = policies.messages(pair.prompt)
            chat = [*asked, {"role": "assistant", "content": pair.completion}]
            ids = tokenizer.chat_with_mask(chat)[0]
            prompt = tokenizer.chat(asked)
            if ids[: len(prompt)] != prompt:
                raise ValueError(
                    f"example {place}: the chat template writes the prompt differently where an "
                    "answer follows, so what is learned is not what is sampled; use another one"
                )
            completion = ids[len(prompt) :]
        if len(completion) > max_tokens:
            raise ValueError(
                f"example {place} has a completion of {len(completion)} tokens, its end token "
                f"included, and max_tokens is {max_tokens}; raise max_tokens or shorten the example"
            )
        rows.append((prompt, completion))
    return rows


def to_arrays(
    rows: Sequence[tuple[list[int], list[int]]], prompt_columns: int, response_columns: int
) -> tuple[Sequences, base.Batch]:
    """Right-padded rows of one prompt and one response; every completion token is trained on."""
    n = len(rows)
    prompt = np.zeros((n, prompt_columns), np.int32)
    response = np.zeros((n, 1, response_columns), np.int32)
    mask = np.zeros((n, response_columns), np.float32)
    for i, (p, c) in enumerate(rows):
        prompt[i, : len(p)], response[i, 0, : len(c)], mask[i, : len(c)] = p, c, 1.0
    length: Any = np.asarray([len(p) for p, _ in rows], np.int32)
    arrays: Any = (prompt, response, mask)
    return Sequences(arrays[0], length, arrays[1]), base.Batch(mask=arrays[2])


class Run:
    """A run in progress: `for step, values in run.steps(n)`."""

    def __init__(self, policy: policies.Policy, pairs: Sequence[Pair], config: Config) -> None:
        self.policy, self.config = policy, config
        self.rows = encode(policy, pairs, config.max_tokens)
        self.columns = (
            runs.round_up(max(len(p) for p, _ in self.rows)),
            runs.round_up(max(len(c) for _, c in self.rows)),
        )
        self.stream = sources.PromptStream(self.rows, config.seed)
        loss = algorithms.sft()
        optimiser = optimisers.make_optimiser(config.optimiser, config.steps)
        step_cfg = steps.StepConfig(
            config.microbatches, remat=config.remat, precision=config.precision
        )
        steps.check_rows(config.batch, config.microbatches, policy.layout)
        self.update = steps.make_step(policy.cfg, loss, optimiser, step_cfg, policy.layout)
        self.state = steps.make_init(policy.cfg, optimiser, policy.layout)(policy.params)
        self.state = self.state.replace(loss_state=loss.init(base.Batch(mask=np.zeros((1, 1)))))  # pyright: ignore[reportArgumentType]

    @property
    def number(self) -> int:
        """Updates done."""
        return int(self.state.step)

    def steps(self, count: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Does `count` updates, yielding the number of each (from 0) and its metrics."""
        for _ in range(count):
            number = self.number
            sequences, batch = to_arrays(self.stream.next(self.config.batch), *self.columns)
            self.state, values = self.update(self.state, sequences, batch)
            self.policy.update(self.state.params, number + 1)
            floats = metrics.to_floats(values)
            runs.check_finite(number, floats)
            yield number, floats


def run(config: Config, workdir: str | Path, resume: bool = False) -> Run:
    """Trains by `config` in `workdir`; with `resume` goes on from its last checkpoint."""
    workdir = Path(workdir)
    layout = rules.Layout.of(mesh.make_mesh(config.mesh), rules.TRAIN_RULES)
    policy = runs.make_policy(config.model, layout, policies.DecodeConfig(), config.precision)
    pairs = config.pairs() if callable(config.pairs) else config.pairs
    made = Run(policy, pairs, config)
    saver = runs.Saver(workdir, policy, config.checkpoint_every, config.steps)
    if resume:
        made.state, meta = saver.restore(made.state)
        made.stream.load(meta["data"])
        provenance.write_versions(workdir)
        policy.update(made.state.params, made.number)
    else:
        provenance.save_config(config, workdir)
    with (
        metrics.Writer(workdir, start=made.number, tensorboard=config.tensorboard) as writer,
        progress.Progress(config.steps, start=made.number, title="sft") as display,
    ):
        for number, values in made.steps(config.steps - made.number):
            display.update(number, writer.write(number, {**values, **display.times()}))
            saver.maybe_save(number + 1, made.state, {"data": made.stream.state()})
    return made
