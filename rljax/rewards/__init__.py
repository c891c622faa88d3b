"""Reward functions: what a completion is worth. They know texts and rows, and no model."""

from rljax.rewards.base import Reward, RewardError, Scores, call_reward, combine, each
from rljax.rewards.format import matches
from rljax.rewards.math import (
    MathReward,
    boxed,
    first_line,
    hashed,
    last_line,
    last_number,
    match,
    same,
    stated,
    whole_number,
)
from rljax.rewards.sentiment import cheerfulness

__all__ = [
    "MathReward",
    "Reward",
    "RewardError",
    "Scores",
    "boxed",
    "call_reward",
    "cheerfulness",
    "combine",
    "each",
    "first_line",
    "hashed",
    "last_line",
    "last_number",
    "match",
    "matches",
    "same",
    "stated",
    "whole_number",
]
