"""Cheerfulness of a text by VADER, a lexicon with rules: a reward without a model.

Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
Text", ICWSM 2014, in the package nltk-vader-sentiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljax.rewards import base


def cheerfulness(sign: float = 1.0) -> base.Reward:
    """`sign` x VADER's compound score, from -1 (gloomy) over 0 (no feeling) to 1 (cheerful)."""
    try:
        import vader
    except ImportError:
        raise ImportError(
            "the sentiment reward needs VADER; install it with: pip install nltk-vader-sentiment"
        ) from None

    def sentiment_compound(texts: Sequence[str], examples: Sequence[Any]) -> list[float | None]:
        del examples  # the feeling of a text needs no reference
        return [sign * vader.polarity_scores(text)["compound"] for text in texts]

    return sentiment_compound
