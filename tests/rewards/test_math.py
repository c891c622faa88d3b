"""Numbers read from text, answers found in it, and the reward on top of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import SimpleNamespace

import pytest

from rljax.rewards import math as answers


@pytest.mark.parametrize(
    ("text", "number"),
    [  # the number that a person would read last
        ("27 + 58 = 85", 85),
        ("The answer is 18.", 18),
        ("$1,234.50!", Fraction("1234.5")),
        ("x = -5", -5),
        ("−5", -5),
        ("-$5", -5),
        ("$-5", -5),
        ("2 + -3", -3),
        ("7 - 5", 5),
        ("12-5", 5),
        ("(3) - 4", 4),
        ("50%", 50),
        ("\\$18", 18),
        ("18 dollars", 18),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("-\\frac{1}{2}", Fraction(-1, 2)),
        ("10/2 = 5", 5),
        ("1{,}000", 1000),
        ("1,2,3", 3),
        ("1e-3", Fraction(1, 1000)),
        ("H2O", None),
        ("none", None),
        ("", None),
        ("3/0", None),
        ("9" * 5000, None),  # more digits than int() accepts
    ],
)
def test_the_last_number_is_read(text, number):
    assert answers.last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        ("$1,234", 1234),
        ("50 %", 50),
        ("-3/4", Fraction(-3, 4)),
        ("5.0", 5),
        ("5 apples", None),
        ("3, 4", None),
        ("x", None),
        ("", None),
    ],
)
def test_a_text_that_is_one_number_is_told_from_others(text, number):
    assert answers.whole_number(text) == number


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("It is 1,000 km", "1000", True),
        ("18.00", "18", True),
        ("0.75", "3/4", True),
        ("18.5", "18", False),
        ("", "0", False),  # an empty answer is not zero
        ("  Paris ", "paris", True),
        ("Paris, I think", "paris", False),
        ("5", "x = 5", False),
    ],
)
def test_an_answer_is_compared_by_value_where_the_reference_is_a_number(answer, gold, right):
    assert answers.same(answer, gold) is right


def test_the_first_line_counts_and_rambling_after_it_does_not():
    text = "\n  \n7 + 5 = 12\nNow 3 + 3 = 6"
    assert answers.first_line(text) == "7 + 5 = 12"
    assert answers.last_line(text) == "Now 3 + 3 = 6"
    assert answers.first_line("") == answers.last_line(" \n ") == ""
    row = [SimpleNamespace(uid=0, answer="12")]
    assert answers.match()([text], row) == [1.0]
    assert answers.match(str)([text], row) == [0.0]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so \\boxed{18}.", "18"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2", "1"),  # the token limit cut the second
        ("no box", None),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_complete_box_is_found(text, content):
    assert answers.boxed(text) == content


def test_a_marked_answer_wins_over_the_text():
    assert answers.stated("5 \\boxed{6} 7") == "6"
    assert answers.stated("5 #### 6\n7") == "6"
    assert answers.stated("5 6 7") == "5 6 7"


def test_an_empty_completion_scores_zero():
    """FC51."""
    row = [SimpleNamespace(uid=0, answer="0")]
    for extract in (answers.first_line, answers.last_line, answers.stated, str):
        assert answers.match(extract)([""], row) == [0.0]


def test_a_row_without_answer_is_not_scored():
    assert answers.match()(["", "5"], [SimpleNamespace(uid=0, answer="")] * 2) == [None, None]


def test_every_gsm8k_answer_is_read_and_equals_itself(shared):
    lines = shared("data/gsm8k/test.jsonl").read_text()
    golds = [json.loads(line)["answer"] for line in lines.splitlines()]
    assert len(golds) == 1319  # data/SOURCES.md
    for gold in golds:
        short = gold.split("####")[1].strip()
        assert answers.whole_number(short) is not None
        assert answers.same(answers.stated(gold), short)


def test_numbers_are_compared_in_threads():
    """math-verify refuses threads; this half does not."""
    rows = [SimpleNamespace(uid=i, answer=str(i)) for i in range(40)]
    texts = [f"= {i}" for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for values in pool.map(lambda _: answers.match()(texts, rows), range(8)):
            assert values == [1.0] * 40
