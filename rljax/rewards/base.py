"""The one door through which rewards are computed, and the ways to build one reward from others.

A reward is a function of completions and their examples that returns one number per completion, or
None where it has no opinion:

    def brevity(texts, examples):
        return [-len(text) / 100 for text in texts]
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Example(Protocol):
    """What a reward may read of a row; `rljax.envs.Example` is one."""

    @property
    def uid(self) -> int: ...
    @property
    def prompt(self) -> Any: ...
    @property
    def answer(self) -> str: ...
    @property
    def info(self) -> dict[str, Any]: ...


Reward = Callable[[Sequence[str], Sequence[Any]], Sequence[float | None]]


class RewardError(RuntimeError):
    """A reward function did not do its part; the message names function, row and remedy."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Rewards of N completions.

    Attributes:
      value: [N] float32, 0 where not scored.
      scored: [N] bool, False where the function returned None: such a completion takes no part in
        training.
      counts: events worth a metric, "not_scored" always and whatever the function counts
        ("timeout", ...).
    """

    value: np.ndarray
    scored: np.ndarray
    counts: dict[str, int]


def call_reward(fn: Reward, texts: Sequence[str], examples: Sequence[Any]) -> Scores:
    """Calls `fn` and checks what comes back. 0.0 is a score; only None is "not scored".

    A function may keep a Counter named `counts`; what this call added to it is handed on.

    Raises:
      RewardError: if `fn` raises, or returns the wrong count or something that is not a finite
        number.
    """
    name = name_of(fn)
    if len(texts) != len(examples):
        raise ValueError(f"{len(texts)} texts for {len(examples)} examples; give one each")
    before = Counter(getattr(fn, "counts", {}))
    try:
        values = fn(texts, examples)
    except RewardError:
        raise
    except Exception as error:
        raise _blame(fn, texts, examples, error) from error
    if isinstance(values, str | dict) or not hasattr(values, "__len__"):
        raise RewardError(
            f"reward function {name} returned a {type(values).__name__} for {len(texts)} "
            "completions; return a list with one number (or None) each, or wrap a function of "
            "one completion in rljax.rewards.each"
        )
    if len(values) != len(texts):
        raise RewardError(
            f"reward function {name} returned {len(values)} values for {len(texts)} completions; "
            "return one number each, in order, and None for a completion that it does not score"
        )
    value = np.zeros(len(texts), np.float32)
    scored = np.ones(len(texts), bool)
    for i, (raw, example) in enumerate(zip(values, examples, strict=True)):
        if raw is None:
            scored[i] = False
        else:
            value[i] = _finite(raw, name, example)
    counts = Counter(getattr(fn, "counts", {}))
    counts.subtract(before)
    return Scores(value, scored, {**counts, "not_scored": int((~scored).sum())})


def _finite(raw: Any, name: str, example: Any) -> float:
    try:
        number = float(raw)
    except (TypeError, ValueError):
        raise RewardError(
            f"reward function {name} returned {raw!r} for row uid {example.uid}, which is not a "
            "number; return a float, or None where it cannot score"
        ) from None
    if not math.isfinite(number):
        raise RewardError(
            f"reward function {name} returned {number} for row uid {example.uid}; a reward must "
            "be finite: return None where it cannot score, or clip the value"
        )
    return number


def _blame(
    fn: Reward, texts: Sequence[str], examples: Sequence[Any], error: Exception
) -> RewardError:
    """The error for a function that raised; finds the row by calling it on one row at a time."""
    where = f"one of {len(texts)} completions"
    for text, example in zip(texts, examples, strict=True):
        try:
            fn([text], [example])
        except Exception as again:
            where, error = f"row uid {example.uid} (completion {text[:80]!r})", again
            break
    return _raised(fn, where, error)


def _raised(fn: Callable[..., Any], where: str, error: Exception) -> RewardError:
    return RewardError(
        f"reward function {name_of(fn)} raised {type(error).__name__}: {error} on {where}; "
        "correct the function, or let it return None for completions that it cannot score"
    )


def name_of(fn: Any) -> str:
    """Name of a reward in messages and metrics."""
    return getattr(fn, "__name__", type(fn).__name__)


def _named(fn: Any, name: str) -> Any:
    fn.__name__ = fn.__qualname__ = name
    return fn


def each(fn: Callable[[str, Any], float | None]) -> Reward:
    """Lifts `fn(text, example) -> number or None` to a reward over lists."""

    def reward(texts: Sequence[str], examples: Sequence[Any]) -> list[float | None]:
        values = []
        for text, example in zip(texts, examples, strict=True):
            try:
                values.append(fn(text, example))
            except Exception as error:
                where = f"row uid {example.uid} (completion {text[:80]!r})"
                raise _raised(fn, where, error) from error
        return values

    return _named(reward, name_of(fn))


def combine(*parts: tuple[Reward, float]) -> Reward:
    """Weighted sum, as in combine((correct, 1.0), (tagged, 0.1)); None where a part is None."""
    if not parts:
        raise ValueError("combine() was given no reward; pass at least one (function, weight) pair")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and callable(part[0])):
            raise ValueError(f"combine() takes (function, weight) pairs, not {part!r}")
    return _Combined(parts)


class _Combined:
    def __init__(self, parts: tuple[tuple[Reward, float], ...]) -> None:
        self.parts = parts
        self.counts: Counter[str] = Counter()
        self.__name__ = " + ".join(f"{weight:g} {name_of(fn)}" for fn, weight in parts)

    def __call__(self, texts: Sequence[str], examples: Sequence[Any]) -> list[float | None]:
        total = np.zeros(len(texts), np.float32)
        scored = np.ones(len(texts), bool)
        for fn, weight in self.parts:
            scores = call_reward(fn, texts, examples)
            total += weight * scores.value
            scored &= scores.scored
            self.counts.update({k: n for k, n in scores.counts.items() if k != "not_scored"})
        return [float(v) if s else None for v, s in zip(total, scored, strict=True)]
