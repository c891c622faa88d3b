"""Synchronous rollouts: groups of completions, their rewards, and the arrays a train step reads.

Token ids travel unchanged from the sampler to the loss; masks come from lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rljax import rewards
from rljax.decode.batching import Completion
from rljax.losses.base import Batch


@dataclasses.dataclass(frozen=True)
class Rollout:
    """P prompts with G completions each, on the host; B = P * G rows in prompt order.

    Attributes:
      prompts: [P] token ids of each prompt. completions: [P][G].
      examples: [P] rows of the task. texts: [B] completions as text.
      reward: [B] float32, NaN where the reward function had no opinion.
      counts: events of the reward function ("not_scored", "timeout", ...).
    """

    prompts: list[list[int]]
    completions: list[list[Completion]]
    examples: list[Any]
    texts: list[str]
    reward: np.ndarray
    counts: dict[str, int]

    @property
    def group(self) -> int:
        """Completions per prompt."""
        return len(self.completions[0])

    @property
    def flat(self) -> list[Completion]:
        """[B] completions in row order."""
        return [c for group in self.completions for c in group]

    def mixed(self) -> np.ndarray:
        """[P] bool: the rewards of the group differ, so that a group baseline learns from it."""
        groups = self.reward.reshape(len(self.prompts), -1)
        spread = [np.ptp(g[np.isfinite(g)]) if np.isfinite(g).any() else 0.0 for g in groups]
        return np.asarray(spread) > 1e-6

    def take(self, chosen: Sequence[int]) -> Rollout:
        """The rollout of the prompts at these places."""
        rows = [i * self.group + g for i in chosen for g in range(self.group)]
        return dataclasses.replace(
            self,
            prompts=[self.prompts[i] for i in chosen],
            completions=[self.completions[i] for i in chosen],
            examples=[self.examples[i] for i in chosen],
            texts=[self.texts[r] for r in rows],
            reward=self.reward[rows],
        )

    def join(self, other: Rollout) -> Rollout:
        """Both rollouts one after the other."""
        counts = {
            k: self.counts.get(k, 0) + other.counts.get(k, 0) for k in self.counts | other.counts
        }
        return Rollout(
            self.prompts + other.prompts,
            self.completions + other.completions,
            self.examples + other.examples,
            self.texts + other.texts,
            np.concatenate([self.reward, other.reward]),
            counts,
        )


def collect(
    completions: list[list[Completion]],
    decode: Callable[[Sequence[int]], str],
    reward: rewards.Reward,
    examples: Sequence[Any],
    prompts: list[list[int]],
) -> Rollout:
    """Scores the completions of `prompts`; groups go by place, never by text.

    Args:
      decode: ids -> text for the reward; the ids themselves are what is trained on.

    Raises:
      rewards.RewardError: from the reward function, see `rewards.call_reward`.
    """
    texts = [decode(c.ids.tolist()) for group in completions for c in group]
    rows = [e for e, group in zip(examples, completions, strict=True) for _ in group]
    scores = rewards.call_reward(reward, texts, rows)
    value = np.where(scores.scored, scores.value, np.nan).astype(np.float32)
    return Rollout(prompts, completions, list(examples), texts, value, scores.counts)


def to_arrays(
    rollout: Rollout, prompt_columns: int, response_columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Batch]:
    """Right-padded arrays: prompt [P, columns], its length [P], response [P, G, T], Batch.

    A completion without tokens has length 0 and mask 0; its reward still counts in its group.
    """
    P, G, T = len(rollout.prompts), rollout.group, response_columns
    prompt = np.zeros((P, prompt_columns), np.int32)
    prompt_length = np.asarray([len(p) for p in rollout.prompts], np.int32)
    for row, ids in zip(prompt, rollout.prompts, strict=True):
        row[: len(ids)] = ids
    response = np.zeros((P * G, T), np.int32)
    logp = np.zeros((P * G, T), np.float32)
    length = np.zeros(P * G, np.int32)
    for i, c in enumerate(rollout.flat):
        n = length[i] = len(c.ids)
        if len(c.logp) != n:
            raise ValueError(
                f"completion {i} has {n} ids and {len(c.logp)} log-probs; both are per token"
            )
        response[i, :n], logp[i, :n] = c.ids, c.logp
    arrays: Any = {
        "mask": (np.arange(T) < length[:, None]).astype(np.float32),
        "reward": rollout.reward,
        "group": np.repeat(np.arange(P, dtype=np.int32), G),
        "length": length,
        "truncated": np.asarray([c.stop_reason == "length" for c in rollout.flat], np.float32),
        "logp_sampler": logp,
        "token": response,
    }
    return prompt, prompt_length, response.reshape(P, G, T), Batch(**arrays)


def statistics(rollout: Rollout) -> dict[str, float]:
    """Numbers of a rollout for the metrics: reward, length, truncation, share of mixed groups."""
    lengths = np.asarray([len(c.ids) for c in rollout.flat])
    scored = rollout.reward[np.isfinite(rollout.reward)]
    return {
        "reward/mean": float(scored.mean()) if scored.size else float("nan"),
        "reward/std": float(scored.std()) if scored.size else float("nan"),
        "reward/mixed_groups": float(rollout.mixed().mean()),
        "length/mean_tokens": float(lengths.mean()),
        "length/max_tokens": float(lengths.max()),
        "length/truncated": float(np.mean([c.stop_reason == "length" for c in rollout.flat])),
        "length/empty": float((lengths == 0).sum()),
        **{f"reward/{name}": float(n) for name, n in rollout.counts.items()},
    }
