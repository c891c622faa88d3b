"""Rewards for the form of a completion, to be combined with one for its content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rljax.rewards import base


def matches(pattern: str) -> base.Reward:
    """1.0 where the whole completion, stripped, matches the regular expression, else 0.0.

    Dots match line breaks too.

    DeepSeek-R1's format reward is matches(r"<think>.*</think>\\s*<answer>.*</answer>"),
    arXiv:2501.12948, 2.2.2.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None

    def matches_format(texts: Sequence[str], examples: Sequence[Any]) -> list[float | None]:
        del examples  # form does not depend on the answer
        return [float(compiled.fullmatch(text.strip()) is not None) for text in texts]

    return matches_format
