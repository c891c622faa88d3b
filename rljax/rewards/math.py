"""Rewards for mathematical answers: numbers by regular expression, expressions by math-verify.

The numeric half is pure and thread-safe and costs microseconds; use it for arithmetic and GSM8K.
The symbolic half needs processes that can be killed (`verify_pool`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from rljax.rewards import base, verify_pool

# A sign counts unless it follows a number, word or bracket ("7 - 5", "x-5", ")-5" are
# subtractions).
_SIGN = r"(?:(?<![\w)\]}.%])(?<![\d)]\s)(?P<sign>[-\u2212+])\s?)?"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"{_SIGN}(?:\$(?P<inner>[-\u2212])?)?(?<![\w.])(?P<value>{_DIGITS})"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})(?!\d))?(?: ?/ ?(?P<over>\d+)(?!\.\d))?"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_LATEX_NOISE = re.compile(r"\\(?=[$%])|\\[,!;]|\{(?=,\})|(?<=,)\}")


def last_number(text: str) -> Fraction | None:
    """The last number that `text` states, exactly, or None.

    Reads 1,234.50 and .5 and 3/4 and \\frac{3}{4} and 1e-3; a dollar sign before or a percent sign
    after is ignored, so 50% is 50. "7 - 5" ends in 5, "= -5" in -5.
    """
    text = _LATEX_NOISE.sub("", _LATEX_FRACTION.sub(r"\1/\2", text))
    found = [*_NUMBER.finditer(text)]
    return _value(found[-1]) if found else None


def _value(found: re.Match[str]) -> Fraction | None:
    try:
        value = Fraction(found["value"].replace(",", "")) / int(found["over"] or 1)
        value *= Fraction(10) ** int(found["exponent"] or 0)
    except (ValueError, ZeroDivisionError):  # more digits than int() accepts; x/0
        return None
    negative = found["sign"] in ("-", "\u2212") or found["inner"] is not None
    return -value if negative else value


def whole_number(text: str) -> Fraction | None:
    """The number that `text` consists of ("$1,234", "50%"), or None if it holds anything else."""
    text = _LATEX_NOISE.sub("", _LATEX_FRACTION.sub(r"\1/\2", text)).strip().rstrip("%. ")
    found = _NUMBER.fullmatch(text)
    return None if found is None else _value(found)


def first_line(text: str) -> str:
    """The first line that is not blank, "" if there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def last_line(text: str) -> str:
    """The last line that is not blank, "" if there is none."""
    return first_line("\n".join(reversed(text.splitlines())))


def boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...}, braces balanced, or None."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for i in range(start + len("\\boxed"), len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : i].strip()
        end = start  # cut off by the token limit: look for an earlier one
    return None


def hashed(text: str) -> str | None:
    """The rest of the line after the last "####", GSM8K's mark of the answer, or None."""
    if "####" not in text:
        return None
    return first_line(text.rsplit("####", 1)[1])


def stated(text: str) -> str:
    """The answer marked by \\boxed{} or ####, else the whole text."""
    for marked in (boxed(text), hashed(text)):
        if marked is not None:
            return marked
    return text


def same(answer: str, gold: str) -> bool:
    """Whether `answer` states `gold`.

    By the last number of `answer` where `gold` is a number, else as text, spaces and case aside.
    """
    number = whole_number(gold)
    if number is not None:
        return last_number(answer) == number
    return " ".join(answer.split()).casefold() == " ".join(gold.split()).casefold()


def match(extract: Callable[[str], str] = first_line) -> base.Reward:
    """1.0 where what `extract` finds in the completion states the answer (see `same`), else 0.0.

    A row without an answer is not scored: silence would be right.

    Args:
      extract: `first_line`, `last_line`, `stated`, `str` for the whole text, or any function of the
        completion.
    """

    def answer_match(texts: Sequence[str], examples: Sequence[Any]) -> list[float | None]:
        return [
            float(same(extract(text), example.answer)) if example.answer else None
            for text, example in zip(texts, examples, strict=True)
        ]

    return answer_match


class MathReward:
    """1.0 where math-verify finds the completion's answer equal to the example's, else 0.0.

    The answer is the last \\boxed{}, else what follows ####, else the last line. An answer that is
    missing, longer than `max_chars` or cannot be parsed scores 0; one that runs out of time scores
    `timeout_score`; one on which the verifier crashed is not scored (None). The last three are
    counted in `counts`.

    Use as a context manager, or call `close`; otherwise the workers end with the program.

    Args:
      workers: processes; about 80 answers/s each.
      limit_s: wall-clock seconds for one answer, counted from the start of its own check.
      max_chars: longest answer that is looked at; the limit can only be kept between byte codes or
        by a kill.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        limit_s: float = 5.0,
        max_chars: int = 300,
        timeout_score: float = 0.0,
    ) -> None:
        self.pool = verify_pool.VerifyPool(workers, limit_s)
        self.max_chars = max_chars
        self.counts: Counter[str] = Counter(unparsable=0, timeout=0, crashed=0)
        self.score: dict[verify_pool.Verdict, float | None] = {
            verify_pool.Verdict.CORRECT: 1.0,
            verify_pool.Verdict.INCORRECT: 0.0,
            verify_pool.Verdict.UNPARSABLE: 0.0,
            verify_pool.Verdict.TIMEOUT: timeout_score,
            verify_pool.Verdict.CRASHED: None,
        }

    def __call__(self, texts: Sequence[str], examples: Sequence[Any]) -> list[float | None]:
        verdicts = self.verdicts(texts, [example.answer for example in examples])
        self.counts.update(v.value for v in verdicts if v.value in self.counts)
        return [self.score[verdict] for verdict in verdicts]

    def verdicts(self, texts: Sequence[str], golds: Sequence[str]) -> list[verify_pool.Verdict]:
        """The verdict on each completion, without scores."""
        pairs = [(self._answer(t), _as_latex(g)) for t, g in zip(texts, golds, strict=True)]
        return self.pool.verdicts(pairs)

    def _answer(self, text: str) -> str:
        """What math-verify is to parse; "" where there is nothing to look at."""
        marked = boxed(text)
        answer = (hashed(text) or last_line(text)) if marked is None else marked
        if not answer or len(answer) > self.max_chars:
            return ""
        return answer if marked is None else _as_latex(answer)

    def close(self) -> None:
        """Ends the worker processes."""
        self.pool.close()

    def __enter__(self) -> MathReward:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _as_latex(answer: str) -> str:
    """Marks `answer` as LaTeX: math-verify finds less in bare text than in a box."""
    marked = "\\boxed" in answer or re.search(r"(?<!\\)\$", answer)
    return answer if marked else f"\\boxed{{{answer}}}"
