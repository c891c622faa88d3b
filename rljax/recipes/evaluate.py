"""Held-out rewards of a policy on a task: sampled and greedy, every row exactly once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rljax import metrics, provenance, rewards
from rljax import policy as policies
from rljax.decode import batching
from rljax.envs.single_turn import Task
from rljax.models import layers
from rljax.recipes import workdir as runs
from rljax.sharding import mesh, rules

Split = Literal["test", "train"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of an evaluation.

    Attributes:
      model: what `rljax.load` takes, or a function that makes a Policy.
      task: a Task, or a function that makes one.
      samples: completions per row at `temperature`; a greedy one comes on top.
      max_tokens: longest completion; None = the task's.
      seed: the same seed gives the same completions.
      split: rows of the task to evaluate on.
    """

    model: str | Callable[[], policies.Policy]
    task: Task | Callable[[], Task]
    samples: int = 1
    temperature: float = 1.0
    max_tokens: int | None = None
    seed: int = 0
    split: Split = "test"
    precision: layers.Precision = layers.FLOAT32
    mesh: mesh.MeshConfig = mesh.MeshConfig()
    decode: policies.DecodeConfig = policies.DecodeConfig()


def evaluate(
    policy: policies.Policy,
    task: Task,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    seed: int = 0,
    split: Split = "test",
    shown: int = 16,
) -> dict[str, Any]:
    """Rewards of completions of every row of a split; where the reward is 0 or 1, accuracies.

    A row's completions depend on `seed` and its uid alone, not on the other rows. A completion that
    the reward function does not score is left out of the means and counted.

    Args:
      shown: rows whose texts are returned.

    Returns:
      "sampled": mean over rows and samples at `temperature`. "greedy": mean over rows at
      temperature 0. "count": rows. "samples", "temperature". "not_scored": completions without a
      reward. "truncated": share of all completions that hit the token limit. "texts": for the first
      rows, {"prompt", "text", "reward", "greedy"}, a greedy and a sampled one.

    Raises:
      ValueError: if the split is empty, or a prompt with its completion is longer than the model's
        positions. rewards.RewardError: from the reward function.
    """
    rows = {"test": task.test, "train": task.train}.get(split)
    if rows is None or not len(rows):
        raise ValueError(
            f"task {task.name!r} has no rows in split {split!r}; hold some out, or evaluate on "
            "split='train' or 'test'"
        )
    if samples < 1 or temperature <= 0:
        raise ValueError(
            f"samples={samples} at temperature={temperature}; use at least one sample at a "
            "temperature above 0 (greedy completions are always made too)"
        )
    limit = max_tokens or task.max_tokens
    prompts = [policy.encode(row.prompt) for row in rows]
    longest, uid = max((len(ids), row.uid) for row, ids in zip(rows, prompts, strict=True))
    runs.check_room(policy, longest, uid, limit)
    stop_ids = policy.stop_ids(task.stop)

    def requests(count: int, temperature: float) -> list[batching.Request]:
        return [
            batching.Request(
                prompt=ids, samples=count, seed=_seed(seed, row.uid), max_tokens=limit,
                temperature=temperature, stop_ids=stop_ids,
            )
            for row, ids in zip(rows, prompts, strict=True)
        ]  # fmt: skip

    groups = policy.run([*requests(1, 0.0), *requests(samples, temperature)])
    owners = [row for row, group in zip([*rows, *rows], groups, strict=True) for _ in group]
    flat = [completion for group in groups for completion in group]
    texts = [policy.tokenizer.decode(completion.ids.tolist()) for completion in flat]
    scores = rewards.call_reward(task.reward, texts, owners)
    value = np.where(scores.scored, scores.value, np.nan)  # [rows + rows * samples]
    n = len(rows)
    chosen = [p for i in range(min(shown, n)) for p in (i, n + i * samples)]
    return {
        "sampled": _mean(value[n:]),
        "greedy": _mean(value[:n]),
        "count": n,
        "samples": samples,
        "temperature": temperature,
        "not_scored": scores.counts["not_scored"],
        "truncated": float(np.mean([c.stop_reason == "length" for c in flat])),
        "texts": [
            {
                "prompt": owners[p].prompt,
                "text": texts[p],
                "reward": float(value[p]),
                "greedy": p < n,
            }
            for p in chosen
        ],
    }


def _seed(seed: int, uid: int) -> int:
    return int(np.random.SeedSequence([seed, uid]).generate_state(1)[0] >> 1)  # 31 bits


def _mean(values: np.ndarray) -> float:
    kept = values[np.isfinite(values)]
    return float(kept.mean(dtype=np.float64)) if kept.size else float("nan")


def run(config: Config, workdir: str | Path, resume: bool = False) -> dict[str, Any]:
    """Evaluates by `config`, writes eval.jsonl and samples.jsonl in `workdir` and prints a line."""
    workdir = Path(workdir)
    layout = rules.Layout.of(mesh.make_mesh(config.mesh), rules.TRAIN_RULES)
    policy = runs.make_policy(config.model, layout, config.decode, config.precision)
    task = config.task() if callable(config.task) else config.task
    provenance.save_config(config, workdir)
    result = evaluate(
        policy, task, samples=config.samples, temperature=config.temperature,
        max_tokens=config.max_tokens, seed=config.seed, split=config.split,
    )  # fmt: skip
    if resume:  # an evaluation starts over: nothing of it is kept half done
        for name in (metrics.EVALS, metrics.SAMPLES):
            metrics.truncate_rows(workdir / name, 0)
    write_rows(workdir, result, step=policy.version, phase=config.split)
    print(summary(result))
    return result


def write_rows(workdir: Path, result: dict[str, Any], *, step: int, phase: str) -> None:
    """Appends what `evaluate` returned to eval.jsonl and samples.jsonl, which the report reads."""
    head = {"step": step, "phase": phase}
    rows = [
        {**head, "greedy": greedy, "accuracy": result[name], "count": result["count"]}
        for greedy, name in ((False, "sampled"), (True, "greedy"))
    ]
    metrics.append_rows(workdir / metrics.EVALS, rows)
    metrics.append_rows(workdir / metrics.SAMPLES, [{**head, **row} for row in result["texts"]])


def summary(result: dict[str, Any]) -> str:
    """One line for people."""
    return (
        f"mean reward of {result['count']} rows: {result['sampled']:.3f} at temperature "
        f"{result['temperature']:g} ({result['samples']} samples each), "
        f"{result['greedy']:.3f} greedy"
    )
