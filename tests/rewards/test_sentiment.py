"""VADER as a reward: signs as a reader would give them."""

from __future__ import annotations

import pytest

from rljax.rewards import base, cheerfulness

pytest.importorskip("vader")


def test_cheerful_texts_score_above_neutral_and_gloomy_ones():
    texts = ["She was happy and loved the sun.", "He sat on a chair.", "The sad dog died."]
    good, none, bad = cheerfulness()(texts, [None] * 3)
    assert good is not None and bad is not None
    assert 0.5 < good <= 1.0
    assert none == 0.0
    assert -1.0 <= bad < -0.5
    assert cheerfulness(sign=-1.0)(texts, [None] * 3) == [-good, 0.0, -bad]


def test_the_published_example_is_reproduced():
    # the package's own docstring: polarity_scores("VADER is smart, handsome, and funny!")
    assert cheerfulness()(["VADER is smart, handsome, and funny!"], [None]) == [0.8439]


def test_an_empty_completion_is_neutral():
    """FC51."""

    class Row:
        uid = 0

    scores = base.call_reward(cheerfulness(), [""], [Row()])
    assert scores.value.tolist() == [0.0]
    assert scores.scored.all()


def test_signs_agree_with_human_ratings(shared):
    """4 in 5 of 2,000 rated movie snippets; the data notes measured 80 %, a tenth undecided."""
    path = shared("data/sentiment/movieReviewSnippets_GroundTruth.txt")
    lines = path.read_text(encoding="latin-1").splitlines()[:2000]
    rated = [(float(line.split("\t")[1]), line.split("\t", 2)[2]) for line in lines]
    values = cheerfulness()([text for _, text in rated], [None] * len(rated))
    decided = [(v, mean) for v, (mean, _) in zip(values, rated) if v]
    agree = sum((v > 0) == (mean > 0) for v, mean in decided if v is not None) / len(decided)
    assert agree > 0.75
    assert len(decided) > 0.8 * len(rated)
