"""Reinforcement learning with groups of completions: sample, reward, update, in one process.

The name is GRPO's (Shao et al., arXiv 2402.03300); the algorithm is whatever loss chain the config
holds, and any chain of `rljax.losses` fits.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax import metrics, progress, provenance, report
from rljax import policy as policies
from rljax.data import prompts as sources
from rljax.decode import batching
from rljax.envs.single_turn import Task
from rljax.losses import algorithms, base
from rljax.models import decoder, layers
from rljax.recipes import evaluate
from rljax.recipes import workdir as runs
from rljax.rollout import sync
from rljax.sharding import mesh, rules
from rljax.train import optimiser as optimisers
from rljax.train import step as steps
from rljax.train.state import Sequences


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run.

    Attributes:
      model: what `rljax.load` takes, or a function that makes a Policy.
      task: a Task, or a function that makes one.
      loss: a chain of `rljax.losses`, for instance `losses.algorithms.dapo()`.
      prompts: prompts per step. group: completions per prompt.
      updates: optimiser updates per rollout; the prompts are cut into as many parts.
      refill: times a step may sample again to replace groups whose rewards are all equal (dynamic
        sampling, DAPO, arXiv 2503.14476 section 3.2).
      max_tokens: longest completion; None = the task's.
      max_prompt_tokens: longest prompt; None = the longest of the task.
      topk: likeliest ids that the sampler records with every token where the loss reads them; 20
        hold 99% of the probability and more (Qi et al., arXiv 2602.04879).
      seed: None draws one and records it in config.json.
      eval_every: steps between held-out evaluations while training; 0 = before and after only.
      eval_samples: completions per held-out prompt at the training temperature.
      checkpoint_every: steps between checkpoints; 0 = at the end only.
    """

    model: str | Callable[[], policies.Policy]
    task: Task | Callable[[], Task]
    loss: base.LossTransform = dataclasses.field(default_factory=algorithms.grpo)
    steps: int = 50
    prompts: int = 8
    group: int = 8
    updates: int = 1
    refill: int = 0
    temperature: float = 1.0
    max_tokens: int | None = None
    max_prompt_tokens: int | None = None
    optimiser: optimisers.OptimiserConfig = optimisers.OptimiserConfig()
    microbatches: int = 1
    remat: decoder.Remat = "none"
    precision: layers.Precision = layers.FLOAT32
    mesh: mesh.MeshConfig = mesh.MeshConfig()
    decode: policies.DecodeConfig = policies.DecodeConfig()
    topk: int = 20
    seed: int | None = None
    eval_every: int = 0
    eval_samples: int = 4
    checkpoint_every: int = 0
    tensorboard: bool = False

    @property
    def on_policy(self) -> bool:
        """Each batch is used for one update, by the parameters that sampled it."""
        return self.updates == 1

    @property
    def total_updates(self) -> int:
        """Updates of the policy in the whole run, over which the schedule goes."""
        return self.steps * self.updates


@dataclasses.dataclass(frozen=True)
class Step:
    """A finished step: its number from 0, its metrics and the rollout it learned from."""

    number: int
    metrics: dict[str, float]
    rollout: sync.Rollout


class Run:
    """A run in progress; `start` makes one from a policy in memory.

    Attributes:
      policy: holds the current parameters; sample from it at any time.
      state: the train state. last: the last finished step.
    """

    def __init__(
        self,
        policy: policies.Policy,
        task: Task,
        config: Config,
        display: progress.Progress | None = None,
    ) -> None:
        base.check_groups(config.loss, config.group)
        _check_supply(config)
        if config.temperature <= 0:
            raise ValueError(
                f"temperature {config.temperature} samples greedily, so that the samples of a "
                "group are equal; use a temperature above 0, 1.0 for instance"
            )
        if "topk_ids" in config.loss.needs and config.topk < 1:
            raise ValueError(
                f"the loss reads the sampler's likeliest ids and topk is {config.topk}; use 1 or "
                "more, 20 for instance"
            )
        self.policy, self.task, self.config = policy, task, config
        self.display = display or progress.Progress(config.steps, quiet=True)
        self.seed = secrets.randbits(31) if config.seed is None else config.seed
        self.max_tokens = config.max_tokens or task.max_tokens
        self.stop_ids = policy.stop_ids(task.stop)
        self.prompt_columns = runs.round_up(self._longest_prompt())
        self.rows_split = self._split()
        self.stream = sources.PromptStream(task.train, self.seed)
        if "topk_ids" in config.loss.needs:
            policy.decode = dataclasses.replace(policy.decode, topk=config.topk)
        slots = self._slots()
        # Held-out prompts have other counts of samples; a block that fits both leaves few idle.
        share = math.gcd(slots, config.group, config.eval_samples)
        policy.reserve(slots, self.prompt_columns, self.max_tokens, share)

        self.optimiser = optimisers.make_optimiser(config.optimiser, config.total_updates)
        early = any({"logp_old"} <= m.needs and "token_reward" in m.gives for m in _flat(config))
        self.step_cfg = steps.StepConfig(
            config.microbatches, config.temperature, on_policy=config.on_policy and not early,
            remat=config.remat, precision=config.precision,
        )  # fmt: skip
        self.update = steps.make_step(
            policy.cfg, config.loss, self.optimiser, self.step_cfg, policy.layout
        )
        self.score = steps.make_score(policy.cfg, self.step_cfg, policy.layout)
        self.reference = None
        if "logp_ref" in config.loss.needs:
            self.reference = jax.tree.map(jnp.copy, policy.params)
        self.state = steps.make_init(policy.cfg, self.optimiser, policy.layout)(policy.params)
        loss_state = jax.device_put(config.loss.init(_blank(config)), policy.layout.replicated)
        self.state = self.state.replace(loss_state=loss_state)
        self.number = 0
        self.last: Step | None = None

    def _longest_prompt(self) -> int:
        """Tokens of the task's longest prompt; refuses one past the limit before any work."""
        limit = self.config.max_prompt_tokens
        longest, uid = max(
            (len(self.policy.encode(e.prompt)), e.uid) for e in (*self.task.train, *self.task.test)
        )
        if limit is not None and longest > limit:
            raise ValueError(
                f"the prompt of row {uid} has {longest} tokens and max_prompt_tokens is {limit}; "
                "raise it, or drop such rows from the task"
            )
        runs.check_room(self.policy, longest, uid, self.max_tokens)
        return longest

    def _split(self) -> int:
        """Train rows a group is cut into: the fewest that divide into microbatches and devices."""
        c = self.config
        if c.prompts % c.updates:
            raise ValueError(f"{c.prompts} prompts do not divide into {c.updates} updates")
        prompts = c.prompts // c.updates
        parts = c.microbatches * self.policy.layout.size("batch")
        for split in range(1, c.group + 1):
            if c.group % split == 0 and prompts * split % parts == 0:
                return split
        steps.check_rows(prompts * c.group, c.microbatches, self.policy.layout)
        return c.group

    def _slots(self) -> int:
        return self.config.decode.slots or self.config.prompts * self.config.group

    def _seeds(self, count: int, draw: int) -> list[int]:
        """One sampling seed a prompt, from the run's seed, the step and the draw within it."""
        words = np.random.SeedSequence([self.seed, self.number, draw]).generate_state(count)
        return (words >> 1).astype(int).tolist()

    def _complete(
        self, prompts: list[list[int]], seeds: list[int]
    ) -> list[list[batching.Completion]]:
        requests = [
            batching.Request(
                prompt=ids, samples=self.config.group, seed=seed, max_tokens=self.max_tokens,
                temperature=self.config.temperature, stop_ids=self.stop_ids,
            )
            for ids, seed in zip(prompts, seeds, strict=True)
        ]  # fmt: skip
        return self.policy.run(requests)

    def _collect(self, draw: int) -> sync.Rollout:
        examples = self.stream.next(self.config.prompts)
        prompts = [self.policy.encode(e.prompt) for e in examples]
        with self.display.phase("sample"):
            completions = self._complete(prompts, self._seeds(len(prompts), draw))
        with self.display.phase("reward"):
            return sync.collect(
                completions, self.policy.tokenizer.decode, self.task.reward, examples, prompts,
            )  # fmt: skip

    def rollout(self) -> tuple[sync.Rollout, dict[str, float]]:
        """Samples and scores one step's groups, refilling flat ones where the config says so."""
        drawn = self._collect(0)
        values = sync.statistics(drawn)  # of all that was sampled, before any choice
        for draw in range(1, self.config.refill + 1):
            mixed = drawn.mixed()
            keep, flat = np.flatnonzero(mixed).tolist(), np.flatnonzero(~mixed).tolist()
            if len(keep) >= self.config.prompts:
                break
            more = drawn.take([*keep, *flat]).join(self._collect(draw))
            mixed = more.mixed()
            order = [*np.flatnonzero(mixed).tolist(), *np.flatnonzero(~mixed).tolist()]
            drawn = more.take(order[: self.config.prompts])
            values["reward/refills"] = float(draw)
        return drawn, values

    def _rows(self, prompt: Any, length: Any, response: Any) -> Sequences:
        """Cuts each group into `rows_split` rows that repeat its prompt."""
        split, (P, G, T) = self.rows_split, response.shape
        rows: Any = (np.repeat(prompt, split, 0), np.repeat(length, split, 0))
        return Sequences(rows[0], rows[1], response.reshape(P * split, G // split, T))

    def step(self) -> Step:
        """Does one step: rollout, the log-probs that the loss reads, updates."""
        rollout, values = self.rollout()
        prompt, length, response, batch = sync.to_arrays(
            rollout, self.prompt_columns, runs.round_up(self.max_tokens, 8)
        )
        rows = self._rows(prompt, length, response)
        with self.display.phase("score"):
            batch = jax.block_until_ready(self.fill(rows, batch, rollout))
        with self.display.phase("train"):
            values |= self.learn(rows, batch, rollout)
        self.policy.update(self.state.params, self.number + 1)
        self.last = Step(self.number, values, rollout)
        self.number += 1
        return self.last

    def fill(self, rows: Sequences, batch: base.Batch, rollout: sync.Rollout) -> base.Batch:
        """Adds what the loss reads and the sampler does not know: log-probs of other parameters."""
        del rollout
        if self.reference is not None:
            batch = batch.replace(logp_ref=self.score(self.reference, rows)["logp"])
        if "logp_old" in self.config.loss.needs and not self.step_cfg.on_policy:
            batch = batch.replace(logp_old=self.score(self.state.params, rows)["logp"])
        return batch

    def learn(self, rows: Sequences, batch: base.Batch, rollout: sync.Rollout) -> dict[str, float]:
        """Updates the policy on each part of the batch in turn; returns the mean metrics."""
        del rollout
        anchor = ()
        if self.config.loss.needs & steps.FULL:  # a copy: the first update donates the parameters
            anchor = (jax.tree.map(jnp.copy, self.state.params),)
        means = []
        for part, piece in cut(self.config.updates, rows, batch):
            self.state, out = self.update(self.state, part, piece, *anchor)
            means.append(metrics.to_floats(out))
            runs.check_finite(self.number, means[-1])
        return mean_of(means)

    def steps(self, count: int) -> Iterator[Step]:
        """Does `count` steps, yielding each; stop iterating at any time."""
        for _ in range(count):
            step = self.step()
            times = self.display.times()
            tokens = sum(len(c.ids) for c in step.rollout.flat)
            speed = {"speed/tokens_per_s": tokens / max(times.get("time/sample_s", 0.0), 1e-9)}
            speed["compile/programs"] = float(_compiled.count)
            self.last = dataclasses.replace(step, metrics={**step.metrics, **times, **speed})
            yield self.last

    def evaluate(self) -> dict[str, Any]:
        """Held-out accuracy, sampled and greedy (see `recipes.evaluate`)."""
        return evaluate.evaluate(
            self.policy, self.task, samples=self.config.eval_samples,
            temperature=self.config.temperature, max_tokens=self.max_tokens, seed=self.seed,
        )  # fmt: skip

    def show(self, step: int = -1) -> None:
        """Prints the last step's groups: texts, rewards, advantages (reward minus group mean)."""
        if self.last is None or step not in (-1, self.last.number):
            raise ValueError("only the last step is kept; do a step first, then show(step=-1)")
        rollout, G = self.last.rollout, self.last.rollout.group
        print(f"step {self.last.number}, last group: {rollout.examples[-1].prompt}")
        for text, reward, gain in zip(
            rollout.texts[-G:], rollout.reward[-G:],
            rollout.reward[-G:] - np.nanmean(rollout.reward[-G:]), strict=True,
        ):  # fmt: skip
            print(f"  reward {reward:6.2f}  advantage {gain:+6.2f}  {text.strip()!r}")

    def saved(self) -> Any:
        """What a checkpoint keeps: a tree whose `params` are the policy's."""
        return self.state

    def load(self, saved: Any) -> None:
        """Takes over what `saved` returned."""
        self.state = saved

    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the train state."""
        return {"data": self.stream.state(), "seed": self.seed, "number": self.number}

    def restore(self, saver: runs.Saver) -> None:
        """Goes on from the last complete checkpoint."""
        tree, meta = saver.restore(self.saved())
        self.load(tree)
        self.number, self.seed = meta["number"], meta["seed"]
        self.stream = sources.PromptStream(self.task.train, self.seed)
        self.stream.load(meta["data"])
        self.policy.update(self.state.params, self.number)


def cut(parts: int, *trees: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the trees' parts of the leading axis in order; each holds whole groups."""
    for i in range(parts):

        def part(x: Any, i: int = i) -> Any:
            size = x.shape[0] // parts
            return x[i * size : (i + 1) * size]

        yield tuple(jax.tree.map(part, tree) for tree in trees)


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over rows that name the same ones."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _flat(config: Config) -> tuple[base.LossTransform, ...]:
    return config.loss.members or (config.loss,)


def _blank(config: Config) -> base.Batch:
    """A batch of this config's size with nothing in it, from which a loss makes its first state."""
    B = config.prompts // config.updates * config.group
    tokens, rows = np.zeros((B, 1), np.float32), np.zeros(B, np.float32)
    count = np.zeros(B, np.int32)
    slots = np.zeros((B, 1, config.topk), np.float32)
    arrays: Any = {
        "topk_ids": slots.astype(np.int32),
        "topk_logp": slots,
        **dict.fromkeys(("mask", "logp_sampler", "logp_old", "logp_ref"), tokens),
        **dict.fromkeys(("reward", "truncated"), rows),
        **dict.fromkeys(("group", "length"), count),
        "token": np.zeros((B, 1), np.int32),
    }
    return base.Batch(**arrays)


def _check_supply(config: Config) -> None:
    """Raises, before any work, where the loss reads what this recipe does not provide."""
    blank = _blank(config)
    provided = {f.name for f in dataclasses.fields(blank) if getattr(blank, f.name) is not None}
    provided |= {"entropy", "sum_squares", "topk_logp_live"} | steps.FULL  # the train step's
    for need in sorted(n for n in config.loss.needs - provided if not base.is_mark(n)):
        member = next((m.name for m in config.loss.members if need in m.needs), config.loss.name)
        advice = base.SUPPLY.get(need, "")
        raise ValueError(
            f"{member} reads `{need}`, which this recipe does not provide; choose another loss, or "
            f"train in a loop of your own: {advice or 'give it to the loss'}"
        )


class _Compiled:
    """Counts the programs XLA compiles in this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on)

    def _on(self, event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        self.count += event == "/jax/core/compile/backend_compile_duration"


_compiled = _Compiled()


def start(
    policy: policies.Policy,
    task: Task,
    *,
    group: int = 8,
    prompts: int = 8,
    lr: float = 1e-6,
    loss: base.LossTransform | None = None,
    **settings: Any,
) -> Run:
    """Makes a run from a policy in memory: `for step in run.steps(50): ...`.

    Args:
      settings: other fields of `Config`, for instance temperature=0.8, max_tokens=64, seed=0.
    """
    optimiser = settings.pop("optimiser", optimisers.OptimiserConfig(lr=lr))
    config = Config(
        model="", task=task, loss=loss or algorithms.grpo(), group=group, prompts=prompts,
        optimiser=optimiser, **settings,
    )  # fmt: skip
    return Run(policy, task, config)


def run(config: Config, workdir: str | Path, resume: bool = False, make: type[Run] = Run) -> Run:
    """Trains by `config` in `workdir` and writes a report; `resume` goes on where it stopped.

    Leaves config.json, versions.jsonl, metrics.jsonl, samples.jsonl, eval.jsonl, checkpoints/ and
    report.html in the directory.

    Args:
      make: class of the run, `Run` or one that a recipe derives from it.
    """
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    layout = rules.Layout.of(mesh.make_mesh(config.mesh), rules.TRAIN_RULES)
    policy = runs.make_policy(config.model, layout, config.decode, config.precision)
    task = config.task() if callable(config.task) else config.task
    display = progress.Progress(config.steps, title=f"{task.name}, {policy.cfg.family}")
    made = make(policy, task, config, display)
    saver = runs.Saver(workdir, policy, config.checkpoint_every, config.steps, made.saved())
    if resume:
        made.restore(saver)
        provenance.write_versions(workdir)
        display.done = made.number
    else:
        provenance.save_config(dataclasses.replace(config, seed=made.seed), workdir)
        _judge(made, workdir, "before")
    # Rows after the checkpoint are written again, and the last step's evaluation always is.
    first_again = made.number + (made.number < config.steps)
    for name in (metrics.EVALS, metrics.SAMPLES):
        metrics.truncate_rows(workdir / name, first_again)
    with (
        metrics.Writer(workdir, start=made.number, tensorboard=config.tensorboard) as writer,
        display,
    ):
        for step in made.steps(config.steps - made.number):
            display.update(step.number, writer.write(step.number, step.metrics))
            if (
                config.eval_every
                and made.number % config.eval_every == 0
                and made.number < config.steps
            ):
                _judge(made, workdir, "during")
            saver.maybe_save(made.number, made.saved(), made.position())
    _judge(made, workdir, "after")
    _conclude(workdir, report.write_report(workdir))
    return made


def _judge(made: Run, workdir: Path, phase: str) -> None:
    """Evaluates on the held-out rows (or, where there are none, does nothing) and writes rows."""
    if not made.task.test:
        return
    with made.display.phase("evaluate"):
        result = made.evaluate()
    evaluate.write_rows(workdir, result, step=made.number, phase=phase)
    made.display.say(f"held-out, {phase} training: {evaluate.summary(result)}")


def _conclude(workdir: Path, page: Path) -> None:
    """Prints some samples before and after, and where the report is."""
    rows = [r for r in metrics.read_rows(workdir / metrics.SAMPLES) if not r["greedy"]]
    by_phase: dict[str, dict[str, Any]] = {"before": {}, "after": {}}
    for row in rows:
        by_phase[row["phase"]].setdefault(json.dumps(row["prompt"]), row)
    for key in list(by_phase["before"])[:4]:
        before, after = by_phase["before"][key], by_phase["after"].get(key)
        if after is not None:
            print(f"\n{before['prompt']}")
            print(f"  before ({before['reward']:g}): {before['text'].strip()!r}")
            print(f"  after  ({after['reward']:g}): {after['text'].strip()!r}")
    print(f"\nreport: {page}")
