"""report.html: one self-contained page about a run: curves, texts before and after, settings.

Reads what the run wrote (metrics.jsonl, samples.jsonl, eval.jsonl, config.json, versions.jsonl) and
may be made again at any time, also while the run goes on. No script, no network: SVG and CSS alone.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from rljax import metrics, provenance
from rljax.metrics import Row

REPORT = "report.html"
MOST_PAIRS = 40  # rows of the table of texts
MOST_POINTS = 300  # points of a curve; more are averaged in runs

# (metric, title, what it is)
CURVES = (
    ("reward/mean", "Reward", "mean over the samples of a step"),
    ("length/mean_tokens", "Length", "tokens of a response, mean"),
    ("kl/reference", "KL to the reference", "nats per token"),
    ("entropy", "Entropy", "nats per token"),
    ("mismatch/mean_abs_logp", "Sampler and trainer", "mean |difference of log-probabilities|"),
)


def write_report(workdir: str | Path) -> Path:
    """Writes workdir/report.html from the rows in the run directory and returns its path.

    samples.jsonl: {"phase": "before" or "after", "prompt", "text", "reward", "greedy"} a row.
    eval.jsonl: {"step", "phase", "greedy", "accuracy", "count"} a row; phases other than before and
    after ("during") only enter the curve of held-out accuracy.
    """
    workdir = Path(workdir)
    if not (workdir / metrics.METRICS).exists():
        raise FileNotFoundError(
            f"{workdir} holds no {metrics.METRICS}, so it is not the directory of a run; "
            "name the directory that was given as --workdir"
        )
    rows = metrics.read_rows(workdir / metrics.METRICS)
    evals = metrics.read_rows(workdir / metrics.EVALS)
    samples = metrics.read_rows(workdir / metrics.SAMPLES)
    versions = metrics.read_rows(workdir / provenance.VERSIONS)
    config_file = workdir / provenance.CONFIG
    config = json.loads(config_file.read_text()) if config_file.exists() else None

    title = workdir.resolve().name
    body = [
        _header(title, versions),
        _cards(rows, evals),
        _section("Curves", _curves(rows, evals)),
        _section("What it writes", _texts(samples)),
        _section("Where the time goes", _phases(rows)),
        _fold("All metrics", _all_metrics(rows)),
        _fold("Configuration", _pre(config) if config else ""),
        _fold("Versions", "".join(_pre(row) for row in versions)),
    ]
    path = workdir / REPORT
    path.write_text(
        PAGE.format(title=_text(title), style=STYLE, body="\n".join(filter(None, body)))
    )
    return path


# Parts of the page


def _header(title: str, versions: Sequence[Row]) -> str:
    last = versions[-1] if versions else {}
    packages = last.get("packages", {})
    commit, _, changed = str(last.get("commit") or "").partition("-")
    facts = [
        str(last.get("time", ""))[:16].replace("T", " "),
        *(f"{name} {packages[name]}" for name in ("rljax", "jax") if name in packages),
        f"commit {commit[:10]}{' and changes' if changed else ''}" if commit else "",
        last.get("machine", ""),
    ]
    line = " · ".join(_text(f) for f in facts if f)
    return f"<header><h1>{_text(title)}</h1><p class=muted>{line}</p></header>"


def _cards(rows: Sequence[Row], evals: Sequence[Row]) -> str:
    """The headline: held-out accuracy and reward before and after, and what it took."""
    cards = []
    for greedy, name in ((False, "sampled"), (True, "greedy")):
        mine = [
            e for e in evals if bool(e.get("greedy")) == greedy and _is_number(e.get("accuracy"))
        ]
        before = next((e for e in mine if e.get("phase") == "before"), None)
        after = next((e for e in reversed(mine) if e.get("phase") == "after"), None)
        if before or after:
            ends = [f"{e['accuracy']:.0%}" if e else "–" for e in (before, after)]
            count = (after or before or {}).get("count")
            note = f"{name}, {count:,} answers" if count else name
            cards.append(_card("Held-out accuracy", _change(*ends), note))
    rewards = _series(rows, "reward/mean")
    if len(rewards) > 1:
        tenth = math.ceil(len(rewards) / 10)
        first, last = (_mean([y for _, y in part]) for part in (rewards[:tenth], rewards[-tenth:]))
        steps = f"mean of {tenth} steps" if tenth > 1 else "one step"
        cards.append(_card("Training reward", _change(f"{first:.2f}", f"{last:.2f}"), steps))
    times = _series(rows, "time/step_s")
    if times:
        seconds = [y for _, y in times]
        middle = sorted(seconds)[len(seconds) // 2]
        note = f"{len(rows):,} steps, {_number(middle)} s each"
        cards.append(_card("Training time", _text(_duration(sum(seconds))), note))
    speeds = sorted(y for _, y in _series(rows, "speed/tokens_per_s"))
    if speeds:
        value = f"{speeds[len(speeds) // 2]:,.0f}"
        cards.append(_card("Tokens per second", value, "sampled tokens, median"))
    return f"<div class=cards>{''.join(cards)}</div>" if cards else ""


def _curves(rows: Sequence[Row], evals: Sequence[Row]) -> str:
    charts = []
    accuracy = []
    for greedy, name in ((False, "sampled"), (True, "greedy")):
        points = [
            (e["step"], e["accuracy"])
            for e in evals
            if bool(e.get("greedy")) == greedy and _is_number(e.get("accuracy")) and "step" in e
        ]
        if len(points) > 1:
            accuracy.append(Line(name, points))
    if accuracy:
        charts.append(chart("Held-out accuracy", "share of right answers", accuracy))
    for name, title, note in CURVES:
        points = _series(rows, name)
        if points:
            charts.append(chart(title, note, [Line("", points)]))
    if not charts:
        return "<p class=muted>No step has been finished yet.</p>"
    note = "Faint: single steps. Strong, and in the corner: means over a tenth of the run."
    return f"<div class=charts>{''.join(charts)}</div><p class='muted below'>{note}</p>"


def _texts(samples: Sequence[Row]) -> str:
    """A table with a row a prompt and a column a phase."""
    if not samples:
        return ""
    phases = list(dict.fromkeys(str(s.get("phase", "")) for s in samples))
    groups: dict[tuple[str, bool], dict[str, list[Row]]] = {}
    for s in samples:
        group = groups.setdefault((_prompt(s.get("prompt", "")), bool(s.get("greedy"))), {})
        group.setdefault(str(s.get("phase", "")), []).append(s)
    rewards = [s["reward"] for s in samples if _is_number(s.get("reward"))]
    low, high = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)

    def cell(sample: Row | None) -> str:
        if sample is None:
            return "<td class=muted>–</td>"
        reward = sample.get("reward")
        badge = ""
        if _is_number(reward):
            share = (reward - low) / (high - low) if high > low else 0.5
            kind = "good" if share > 2 / 3 else "bad" if share < 1 / 3 else "middle"
            badge = f"<span class='badge {kind}'>{_number(reward)}</span>"
        written = str(sample.get("text", ""))
        shown = _text(written) if written.strip() else "<span class=muted>(nothing)</span>"
        return f"<td>{badge}<div class=text>{shown}</div></td>"

    lines = []
    for (prompt, greedy), group in groups.items():
        mode = "greedy" if greedy else "sampled"
        for i in range(max(len(found) for found in group.values())):
            cells = [group.get(p, [])[i : i + 1] for p in phases]
            lines.append(
                f"<tr><td><div class=text>{_text(prompt)}</div><span class=mode>{mode}</span></td>"
                + "".join(cell(found[0] if found else None) for found in cells)
                + "</tr>"
            )
    head = "".join(f"<th>{_text(p.capitalize())}</th>" for p in ("prompt", *phases))
    table = f"<table class=texts><thead><tr>{head}</tr></thead><tbody>"
    table += "".join(lines[:MOST_PAIRS]) + "</tbody></table>"
    if len(lines) > MOST_PAIRS:
        table += f"<p class=muted>{len(lines) - MOST_PAIRS} more are in {metrics.SAMPLES}.</p>"
    return f"<p class=muted>The number is the reward of the text below it.</p>{table}"


def _phases(rows: Sequence[Row]) -> str:
    """One stacked bar of the seconds that each phase of a step takes (medians)."""
    seconds: dict[str, float] = {}
    for name in dict.fromkeys(k for row in rows for k in row):
        if name.startswith("time/") and name != "time/step_s":
            values = sorted(y for _, y in _series(rows, name))
            if values and values[len(values) // 2] > 0:
                seconds[name.removeprefix("time/").removesuffix("_s")] = values[len(values) // 2]
    if not seconds:
        return ""
    total = sum(seconds.values())
    bars, legend = [], []
    for i, (name, s) in enumerate(seconds.items()):
        label = f"{name} {_number(s)} s"
        share = f"{100 * s / total:.3f}%"
        bars.append(f"<span class=c{i % 6} style='width:{share}' title='{_text(label)}'></span>")
        legend.append(f"<li><i class=c{i % 6}></i>{_text(label)}</li>")
    return (
        f"<div class=bar>{''.join(bars)}</div><ul class=legend>{''.join(legend)}</ul>"
        "<p class=muted>Median seconds of a step.</p>"
    )


def _all_metrics(rows: Sequence[Row]) -> str:
    names = dict.fromkeys(k for row in rows for k in row if k != "step")
    charts = [
        chart(name, "", [Line("", points)]) for name in names if (points := _series(rows, name))
    ]
    return f"<div class=charts>{''.join(charts)}</div>" if charts else ""


def _card(title: str, value: str, note: str) -> str:
    return f"<div class=card><h3>{title}</h3><b>{value}</b><p class=muted>{_text(note)}</p></div>"


def _change(before: str, after: str) -> str:
    return f"<span class=before>{before}</span><span class=arrow>→</span>{after}"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _fold(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>" if content else ""


def _pre(value: Any) -> str:
    return f"<pre>{_text(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


# A line chart in SVG


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart; an empty name needs no legend."""

    name: str
    points: Sequence[tuple[float, float]]


WIDTH, HEIGHT = 380, 200
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 24


def chart(title: str, note: str, lines: Sequence[Line]) -> str:
    """Returns a figure: each line smoothed, its raw values faint behind and told on hovering."""
    lines = [Line(line.name, thin(line.points, MOST_POINTS)) for line in lines]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    y_ticks = ticks(min(ys), max(ys))
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return right, down

    parts = []
    for y in y_ticks:
        down = place(x_low, y)[1]
        parts.append(f"<path class=grid d='M{LEFT} {down:.1f}H{WIDTH - RIGHT}'/>")
        parts.append(f"<text x={LEFT - 6} y={down + 3.5:.1f} class=end>{_number(y)}</text>")
    for x in (x_low, x_high):
        right = place(x, y_low)[0]
        kind = "start" if x == x_low else "end"
        parts.append(f"<text x={right:.1f} y={HEIGHT - 6} class={kind}>{_number(x)}</text>")
    parts.append(f"<text x={(LEFT + WIDTH - RIGHT) / 2} y={HEIGHT - 6} class=middle>step</text>")
    for i, line in enumerate(lines):
        smooth = smoothed(line.points)
        if smooth != list(line.points):
            parts.append(f"<path class='line l{i} faint' d='{_path(line.points, place)}'/>")
        parts.append(f"<path class='line l{i}' d='{_path(smooth, place)}'/>")
        if len(line.points) <= 12:
            dots = [place(x, y) for x, y in line.points]
            parts += [f"<circle class=l{i} cx={a:.1f} cy={b:.1f} r=2.5 />" for a, b in dots]
    strip = max((WIDTH - LEFT - RIGHT) / max(len(p.points) for p in lines), 2)
    for x in sorted(set(xs)):
        known = [(p.name, y) for p in lines for px, y in p.points if px == x]
        tip = ", ".join(f"{name} {_number(y)}".strip() for name, y in known)
        right = place(x, y_low)[0] - strip / 2
        parts.append(
            f"<rect x={right:.1f} y={TOP} width={strip:.1f} height={HEIGHT - TOP - BOTTOM}>"
            f"<title>{_text(f'step {_number(x)}: {tip}')}</title></rect>"
        )
    if any(line.name for line in lines):
        key = [f"<i class=k{i}></i>{_text(p.name)}" for i, p in enumerate(lines)]
        value = f"<span class=muted>{' '.join(key)}</span>"
    else:
        value = f"<b>{_number(smoothed(lines[0].points)[-1][1])}</b>"
    head = f"<figcaption><span>{_text(title)}</span>{value}</figcaption>"
    below = f"<p class=muted>{_text(note)}</p>" if note else ""
    return (
        f"<figure>{head}<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>"
        f"<title>{_text(title)}</title>{''.join(parts)}</svg>{below}</figure>"
    )


def _path(points: Iterable[tuple[float, float]], place: Any) -> str:
    placed = (place(x, y) for x, y in points)
    return "M" + "L".join(f"{right:.1f} {down:.1f}" for right, down in placed)


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Averages equal runs of points where there are more than `most`; keeps the last x."""
    run = math.ceil(len(points) / most)
    if run <= 1:
        return list(points)
    parts = [points[i : i + run] for i in range(0, len(points), run)]
    return [(part[-1][0], _mean([y for _, y in part])) for part in parts]


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Mean over a window of a tenth of the points; at the ends, over the half of it that exists."""
    half = len(points) // 20
    means = (
        _mean([y for _, y in points[max(i - half, 0) : i + half + 1]]) for i in range(len(points))
    )
    return [(x, mean) for (x, _), mean in zip(points, means)]


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers (1, 2 or 5 times a power of ten apart) that span low to high."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-6):  # a constant: leave room around it
        room = 0.1 * abs(low) or 1.0
        low, high = low - room, high + room
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [i * step for i in range(first, last + 1)]


# Small helpers


def _series(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if _is_number(row.get(name))]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _prompt(prompt: Any) -> str:
    """A prompt as people read it: the text, or a chat's messages one below the other."""
    if isinstance(prompt, list) and len(prompt) == 1:
        return str(prompt[0].get("content", ""))
    if isinstance(prompt, list):
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in prompt)
    return str(prompt)


def _number(x: float) -> str:
    if x == round(x) and abs(x) < 1e6:
        return f"{round(x):,}"
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.3g}" if abs(x) >= 1e-3 else f"{x:.1e}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02} min" if hours else f"{m} min {s:02} s" if m else f"{s} s"


STYLE = """
:root { color-scheme: light dark; --paper: #faf9f7; --sheet: #ffffff; --ink: #1c2127;
  --muted: #68707b; --rule: #e4e2de; --accent: #2f5fd0; --second: #c2571a; --good: #1a7f4b;
  --good-back: #dff3e7; --bad: #b3372f; --bad-back: #fbe4e1; --middle: #8a6100;
  --middle-back: #f8edcf; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --sheet: #1c2026; --ink: #e6e8eb;
  --muted: #949ca8; --rule: #2e343c; --accent: #86a8ff; --second: #f0a070; --good: #6fd3a0;
  --good-back: #17382a; --bad: #f29189; --bad-back: #43211f; --middle: #e6c068;
  --middle-back: #3b3118; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 36px 28px 64px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 36px 0 12px; }
h3 { font-size: 13px; font-weight: 500; margin: 0; color: var(--muted); }
p { margin: 0; } .muted { color: var(--muted); font-size: 13px; }
.cards { display: grid; gap: 14px; margin-top: 24px;
  grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
.card, figure, .texts, details { background: var(--sheet); border: 1px solid var(--rule);
  border-radius: 10px; }
.card { padding: 14px 18px; }
.card b { display: block; font-size: 26px; line-height: 1.35; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.before { color: var(--muted); font-weight: 500; } .arrow { color: var(--muted); margin: 0 7px;
  font-weight: 400; }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); }
figure { margin: 0; padding: 12px 14px 12px; }
figure p { padding-left: 2px; } .below { margin-top: 10px; }
figcaption { display: flex; justify-content: space-between; font-weight: 600; margin-bottom: 4px;
  overflow-wrap: anywhere; gap: 8px; }
figcaption b { color: var(--accent); font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--muted); font-size: 11px; font-variant-numeric: tabular-nums; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg rect { fill: transparent; } svg rect:hover { fill: var(--rule); fill-opacity: 0.6; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.faint { stroke-width: 1; opacity: 0.28; }
.l0 { stroke: var(--accent); } .l1 { stroke: var(--second); }
circle.l0 { fill: var(--accent); } circle.l1 { fill: var(--second); }
.k0, .k1 { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin: 0 5px 0 8px; }
.k0 { background: var(--accent); } .k1 { background: var(--second); }
.texts { width: 100%; border-collapse: separate; border-spacing: 0; margin-top: 8px;
  table-layout: fixed; overflow: hidden; }
.texts th { text-align: left; font-size: 13px; color: var(--muted); font-weight: 500; }
.texts th, .texts td { padding: 10px 14px; vertical-align: top;
  border-bottom: 1px solid var(--rule); }
.texts tr:last-child td { border-bottom: 0; }
.texts td:first-child, .texts th:first-child { width: 28%; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 13em; overflow-y: auto; }
td + td .text { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.mode { font-size: 12px; color: var(--muted); }
.badge { display: inline-block; border-radius: 6px; padding: 0 8px; font-size: 12px;
  font-weight: 600; margin-bottom: 4px; font-variant-numeric: tabular-nums; }
.good { color: var(--good); background: var(--good-back); }
.bad { color: var(--bad); background: var(--bad-back); }
.badge.middle { color: var(--middle); background: var(--middle-back); }
.bar { display: flex; height: 22px; border-radius: 6px; overflow: hidden; }
.bar span { display: block; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0;
  margin: 10px 0 2px; font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 6px; }
.c0 { background: #3f6fd8; } .c1 { background: #d9793a; } .c2 { background: #3a9a6b; }
.c3 { background: #8d63c9; } .c4 { background: #c9a227; } .c5 { background: #7a8591; }
details { margin-top: 14px; padding: 0 18px; } details:first-of-type { margin-top: 36px; }
summary { cursor: pointer; padding: 12px 0; font-weight: 600; }
details .charts { padding-bottom: 18px; }
pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 0;
  padding-bottom: 16px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 640px) { body { padding: 20px 14px 40px; }
  .texts th, .texts td { padding: 8px; } }
"""

PAGE = """<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>{title} · rljax</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""
