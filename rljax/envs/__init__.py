"""Environments: what the model is asked and what its answers are worth. They know no model."""

from rljax.envs.single_turn import (
    STORY_OPENINGS,
    Example,
    Task,
    arithmetic,
    custom,
    gsm8k,
    jsonl,
    reasoning_gym,
    sentiment,
)

__all__ = [
    "STORY_OPENINGS",
    "Example",
    "Task",
    "arithmetic",
    "custom",
    "gsm8k",
    "jsonl",
    "reasoning_gym",
    "sentiment",
]
