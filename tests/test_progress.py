"""The display: a line a step into a file, a live panel on a terminal."""

from __future__ import annotations

import io
import time

import pytest

from rljax.progress import Progress, clock, sparkline


def test_without_a_terminal_each_step_is_one_line(capsys):
    with Progress(3, title="run") as progress:
        progress.update(0, {"step": 0, "reward/mean": 0.25, "kl/reference": None, "other": 9.0})
        progress.say("checkpoint written")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 1/3  reward 0.250  KL -"
    assert second == "checkpoint written"


def test_quiet_prints_nothing(capsys):
    with Progress(3, quiet=True) as progress:
        progress.update(0, {"reward/mean": 0.25})
        progress.say("text")
    assert capsys.readouterr().out == ""


def test_phases_are_timed_and_restart_with_each_step():
    progress = Progress(2, quiet=True)
    with progress.phase("sample"):
        time.sleep(0.02)
    with progress.phase("sample"):
        time.sleep(0.02)
    times = progress.times()
    assert 0.04 <= times["time/sample_s"] <= times["time/step_s"]
    assert set(progress.times()) == {"time/step_s"}


def test_a_phase_that_raises_is_still_timed():
    progress = Progress(2, quiet=True)
    with pytest.raises(KeyError), progress.phase("score"):
        raise KeyError
    assert "time/score_s" in progress.times()


def test_time_left_leaves_out_the_first_step_which_compiles():
    progress = Progress(10, start=2, quiet=True)
    assert progress.seconds_left() is None
    progress._steps_s = [60.0, 1.0, 3.0, 2.0]
    progress.done = 6
    assert progress.seconds_left() == 8.0  # median of 1, 3, 2 times 4 steps


def test_the_panel_names_step_values_and_phase():
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), force_terminal=True, width=100, color_system=None
    )
    with Progress(40, title="grpo addition", console=console) as progress:
        for step in range(4):
            with progress.phase("sample"):
                pass
            progress.update(step, {"reward/mean": step / 4, "entropy": 1.5} | progress.times())
    text = console.file.getvalue()
    for part in ("grpo addition", "step 4/40", "0.750", "entropy", "sample 0.0 s", "▁▃▆█"):
        assert part in text


def test_durations_read_as_minutes_or_hours():
    assert [clock(s) for s in (0.4, 65, 3723.6)] == ["0:00", "1:05", "1:02:04"]


def test_a_sparkline_has_one_block_per_run_of_values():
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([2.0, 2.0, 2.0]) == "▁▁▁"
    assert sparkline([0, 0, 7, 7], width=2) == "▁█"
