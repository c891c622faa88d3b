"""What a run shows while it works: a live panel on a terminal, one line a step elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rljax.metrics import SHOWN


class Progress:
    """Shows a run while it works: a live panel on a terminal, one line a step elsewhere.

        with Progress(total=60, title="grpo") as progress:
            for step in range(60):
                with progress.phase("sample"):
                    ...
                row = writer.write(step, metrics | progress.times())
                progress.update(step, row)

    Args:
      total: steps of the whole run.
      start: first step of this process, > 0 after a resume.
      quiet: show nothing (phases are still timed).
      console: a rich console; None makes one where standard output is a terminal.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        title: str = "",
        quiet: bool = False,
        console: Any = None,
    ) -> None:
        self.total, self.done, self.title, self.quiet = total, start, title, quiet
        self._console = console
        self._live: Any = None
        self._row: dict[str, Any] = {}
        self._rewards: list[float] = []
        self._phase, self._seconds = "", dict[str, float]()
        self._last = self._begin = time.perf_counter()
        self._steps_s: list[float] = []

    def __enter__(self) -> Progress:
        if not self.quiet and (self._console is not None or sys.stdout.isatty()):
            from rich.console import Console
            from rich.live import Live

            self._console = self._console or Console()
            if self._console.is_terminal:
                self._live = Live(
                    get_renderable=self._panel, console=self._console, refresh_per_second=4
                )
                self._live.start()
        self._last = self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._phase = ""
            self._live.stop()
            self._live = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what is being done ("sample") and adds its duration to this step's times."""
        outer, self._phase = self._phase, name
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._phase = outer
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def times(self) -> dict[str, float]:
        """Returns "time/<phase>_s" and "time/step_s" since the last call, and restarts."""
        now = time.perf_counter()
        times = {f"time/{name}_s": s for name, s in self._seconds.items()}
        times["time/step_s"] = now - self._last
        self._last, self._seconds = now, {}
        self._steps_s.append(times["time/step_s"])
        return times

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Shows the row of a finished step."""
        self._row, self.done = dict(row), step + 1
        if row.get("reward/mean") is not None:
            self._rewards.append(row["reward/mean"])
        if not self.quiet and self._live is None:
            print(self._line(), flush=True)

    def say(self, text: str) -> None:
        """Prints a message; above the panel where there is one."""
        if self.quiet:
            return
        if self._live is not None:
            self._console.print(text, markup=False)
        else:
            print(text, flush=True)

    def seconds_left(self) -> float | None:
        """Estimate from the median of the last 20 steps; None before the first."""
        recent = self._steps_s[1:][-20:] or self._steps_s  # the first step compiles
        return float(np.median(recent)) * (self.total - self.done) if recent else None

    def _shown(self) -> list[tuple[str, str]]:
        present = [(t, self._row[name], fmt) for t, name, fmt in SHOWN if name in self._row]
        return [(title, "-" if v is None else format(v, fmt)) for title, v, fmt in present]

    def _phases(self) -> list[tuple[str, float]]:
        named = ((k, v) for k, v in self._row.items() if k.startswith("time/") and v is not None)
        times = {k.removeprefix("time/").removesuffix("_s"): v for k, v in named}
        return [(name, s) for name, s in times.items() if name != "step"]

    def _line(self) -> str:
        parts = [f"step {self.done}/{self.total}"]
        parts += [f"{title} {value}" for title, value in self._shown()]
        parts += [f"{name} {s:.1f} s" for name, s in self._phases()]
        left = self.seconds_left()
        return "  ".join([*parts, f"left {clock(left)}"] if left is not None else parts)

    def _panel(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = time.perf_counter()
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column()
        head.add_column(ratio=1)
        head.add_column(justify="right")
        left = self.seconds_left()
        head.add_row(
            Text(f"step {self.done}/{self.total}", "bold"),
            ProgressBar(total=max(self.total, 1), completed=self.done),
            f"{clock(now - self._begin)} so far, {clock(left) if left is not None else '?'} left",
        )
        shown = self._shown()
        values = Table.grid(padding=(0, 3))
        if shown:
            values.add_row(*(Text(title, "dim") for title, _ in shown))
            values.add_row(*(Text(value, "bold cyan") for _, value in shown))
        lines: list[Any] = [head, Text(""), values]
        if self._rewards:
            lines.append(Text.assemble(("\nreward  ", "dim"), (sparkline(self._rewards), "green")))
        phases = "   ".join(f"{name} {s:.1f} s" for name, s in self._phases())
        current = f"now: {self._phase}" if self._phase else ""
        lines.append(Text.assemble((phases, "dim"), ("   " if phases else ""), (current, "yellow")))
        return Panel(Group(*lines), title=self.title or None, box=box.ROUNDED, padding=(0, 1))


def clock(seconds: float) -> str:
    """Formats a duration as 1:05 or 2:03:04."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def sparkline(values: list[float], width: int = 60) -> str:
    """Draws values as a line of blocks, each the mean of a run of values where there are many."""
    runs = np.array_split(np.asarray(values), min(width, len(values)))
    means = np.array([run.mean() for run in runs])
    low, high = means.min(), means.max()
    levels = np.zeros(len(means)) if high == low else (means - low) / (high - low)
    return "".join("▁▂▃▄▅▆▇█"[int(x)] for x in np.round(7 * levels))
