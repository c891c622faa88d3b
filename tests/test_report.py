"""The report: self-contained, escaped, and true to the rows it was made from."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from rljax import metrics, provenance, report

ATTACK = "<script>alert(1)</script>"
CHAT = [{"role": "user", "content": "alone?"}]


@pytest.fixture
def run(tmp_path):
    """A finished run of 4 steps whose sampled accuracy rose from 1/5 to 3/5."""
    with metrics.Writer(tmp_path) as writer:
        for step, reward in enumerate((0.125, 0.25, None, 0.75)):
            row = {"reward/mean": float("nan") if reward is None else reward}
            writer.write(
                step, row | {"entropy": 1.5 - step, "time/sample_s": 2.0, "time/step_s": 2.5}
            )
    metrics.append_rows(
        tmp_path / "samples.jsonl",
        [
            {"phase": "before", "prompt": "2 + 3?", "text": ATTACK, "reward": 0.0},
            {"phase": "after", "prompt": "2 + 3?", "text": "five & 5", "reward": 1.0},
            {"phase": "after", "prompt": CHAT, "text": " ", "reward": None, "greedy": True},
        ],
    )
    metrics.append_rows(
        tmp_path / "eval.jsonl",
        [
            {"step": 0, "phase": "before", "greedy": False, "accuracy": 0.2, "count": 5},
            {"step": 4, "phase": "after", "greedy": False, "accuracy": 0.6, "count": 5},
        ],
    )
    provenance.save_config({"lr": 1e-6}, tmp_path, "config = {'lr': 1e-6}")
    return tmp_path


class Balance(HTMLParser):
    """Fails on a closing tag that does not match the one that is open."""

    VOID = frozenset({"meta"})

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass  # closes itself

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(path) -> str:
    """The text of the page, with every tag checked to be closed."""
    parser = Balance()
    parser.feed(path.read_text())
    assert parser.open == []
    return " ".join("".join(parser.text).split())


def test_the_page_tells_accuracy_before_and_after(run):
    text = read(report.write_report(run))
    assert "Held-out accuracy20%→60%sampled, 5 answers" in text
    assert "Training reward0.12→0.75" in text  # 0.125 rounds to even
    assert "lr" in text and "jax" in text


def test_the_page_needs_no_other_file_and_no_script(run):
    page = report.write_report(run).read_text()
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import|https?:", page)


def test_texts_are_escaped(run):
    path = report.write_report(run)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in path.read_text()
    assert ATTACK in read(path)  # as text that a reader sees


def test_a_prompt_has_its_texts_side_by_side(run):
    page = report.write_report(run).read_text()
    (table,) = re.findall(r"<table.*?</table>", page, re.DOTALL)
    first, second = re.findall(r"<tr>(.*?)</tr>", table.split("<tbody>")[1])
    assert first.index("2 + 3?") < first.index("alert(1)") < first.index("five &amp; 5")
    assert re.search(r"alone\?.*greedy.*–.*\(nothing\)", second)


def test_a_run_of_one_step_and_nothing_else_has_a_page(tmp_path):
    metrics.Writer(tmp_path).write(0, {"reward/mean": 0.5})
    assert "Reward0.5" in read(report.write_report(tmp_path))


def test_a_run_killed_before_its_first_step_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No step has been finished" in read(report.write_report(tmp_path))


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="--workdir"):
        report.write_report(tmp_path)


def test_a_curve_goes_through_its_points():
    figure = report.chart("t", "", [report.Line("", [(0, 0.0), (1, 1.0), (2, 0.0)])])
    (path,) = re.findall(r"class='line l0' d='M([^']*)'", figure)
    points = [tuple(map(float, p.split())) for p in path.split("L")]
    low, high = report.HEIGHT - report.BOTTOM, report.TOP
    middle, right = (report.LEFT + report.WIDTH - report.RIGHT) / 2, report.WIDTH - report.RIGHT
    assert points == [(report.LEFT, low), (middle, high), (right, low)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.5, 1]),
        (0.21, 0.83, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (3e-6, 9e-6, [2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
        (-40, 40, [-40, -20, 0, 20, 40]),
        (5.0, 5.0, [4.5, 5.0, 5.5]),
    ],
)
def test_ticks_are_round_and_span_the_values(low, high, expected):
    assert report.ticks(low, high) == pytest.approx(expected)


def test_thinning_keeps_the_mean_and_the_last_step():
    points = [(float(i), float(i % 7)) for i in range(700)]
    thinned = report.thin(points, 100)
    assert len(thinned) == 100 and thinned[-1][0] == 699
    assert {y for _, y in thinned} == {3.0}  # each run holds 0..6 once
    assert report.thin(points[:50], 100) == points[:50]


def test_smoothing_leaves_a_short_curve_as_it_is():
    points = [(float(i), float(i**2)) for i in range(19)]
    assert report.smoothed(points) == points


def test_smoothing_averages_a_tenth_of_the_points():
    points = [(float(i), float(i == 20)) for i in range(40)]  # one spike, half a window of 2
    ys = [y for _, y in report.smoothed(points)]
    assert ys[17:24] == pytest.approx([0, 0.2, 0.2, 0.2, 0.2, 0.2, 0])
