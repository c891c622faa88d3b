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

    Raises:
      ValueError: where the sampler's log-probs break their contract (`check_topk`).
    """
    P, G, T = len(rollout.prompts), rollout.group, response_columns
    prompt = np.zeros((P, prompt_columns), np.int32)
    prompt_length = np.asarray([len(p) for p in rollout.prompts], np.int32)
    for row, ids in zip(prompt, rollout.prompts, strict=True):
        row[: len(ids)] = ids
    response = np.zeros((P * G, T), np.int32)
    logp = np.zeros((P * G, T), np.float32)
    length = np.zeros(P * G, np.int32)
    K = max((c.topk_ids.shape[1] for c in rollout.flat if c.topk_ids is not None), default=0)
    topk_ids, topk_logp = np.full((P * G, T, K), -1, np.int32), np.zeros((P * G, T, K), np.float32)
    for i, c in enumerate(rollout.flat):
        n = length[i] = len(c.ids)
        if len(c.logp) != n:
            raise ValueError(
                f"completion {i} has {n} ids and {len(c.logp)} log-probs; both are per token"
            )
        response[i, :n], logp[i, :n] = c.ids, c.logp
        if c.topk_ids is not None:
            topk_ids[i, :n], topk_logp[i, :n] = c.topk_ids, c.topk_logp
    arrays: Any = {
        "mask": (np.arange(T) < length[:, None]).astype(np.float32),
        "reward": rollout.reward,
        "group": np.repeat(np.arange(P, dtype=np.int32), G),
        "length": length,
        "truncated": np.asarray([c.stop_reason == "length" for c in rollout.flat], np.float32),
        "logp_sampler": logp,
        "token": response,
    }
    if K:
        check_topk(response, logp, topk_ids, topk_logp)
        arrays |= {"topk_ids": topk_ids, "topk_logp": topk_logp}
    return prompt, prompt_length, response.reshape(P, G, T), Batch(**arrays)


def check_topk(
    response: np.ndarray, logp: np.ndarray, topk_ids: np.ndarray, topk_logp: np.ndarray
) -> None:
    """Raises ValueError unless the recorded ids describe the distribution that was sampled from.

    Args:
      response, logp: [B, T]. topk_ids, topk_logp: [B, T, K]; a token without ids is not judged.
    """
    filled = topk_ids >= 0
    chosen = filled & (topk_ids == response[..., None])
    ordered = np.sort(np.where(filled, topk_ids, -1 - np.arange(filled.shape[-1])), -1)
    mass = np.where(filled, np.exp(np.minimum(topk_logp, 1.0)), 0.0).sum(-1)
    off = np.abs(np.where(chosen, topk_logp - logp[..., None], 0.0)).max(initial=0.0)
    remedy = "record them in the engine from the logits at the sampler's temperature and filters"
    facts = [
        (not np.isfinite(topk_logp).all(), "some are not finite"),
        ((np.diff(ordered) == 0).any(), "an id stands twice at one token"),
        (mass.max(initial=0.0) > 1 + 1e-5, f"a token's sum to a probability of {mass.max():.6f}"),
        (off > 1e-4, f"a sampled token's differs from logp_sampler by {off:.2g}"),
    ]
    for wrong, message in facts:
        if wrong:
            raise ValueError(f"topk_logp: {message}; {remedy}")


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
