"""A reward for form: the whole completion has to match."""

from __future__ import annotations

import pytest

from rljax.rewards import matches


def test_the_whole_completion_has_to_match():
    reward = matches(r"<think>.*</think>\s*<answer>.*</answer>")
    good = "<think>2\n+ 2</think>\n<answer>4</answer>\n"
    assert reward([good, good + "and more", ""], [None] * 3) == [1.0, 0.0, 0.0]


def test_a_bad_pattern_is_named():
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        matches("(")
