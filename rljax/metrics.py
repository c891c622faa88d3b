"""Rows a run leaves behind: metrics.jsonl always, TensorBoard files when asked for.

A row is one JSON object a line, step first, numbers finite or null; any tool reads it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.types import Metric

Row = dict[str, Any]

METRICS, SAMPLES, EVALS = "metrics.jsonl", "samples.jsonl", "eval.jsonl"

# What the display and the report put first: (title, metric, format).
SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("length", "length/mean_tokens", ".1f"),
    ("KL", "kl/reference", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("mismatch", "mismatch/mean_abs_logp", ".1e"),
    ("tokens/s", "speed/tokens_per_s", ",.0f"),
)


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Turns metrics, device scalars and numbers into floats with one transfer; NaN stays NaN."""
    means = {k: v.mean if isinstance(v, Metric) else v for k, v in values.items()}
    host = jax.device_get(means)  # sorts the names
    return {name: float(np.asarray(host[name])) for name in means}


def append_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends one JSON object a line and flushes; numbers that are not finite become null."""
    with open(path, "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(to_json(row, longest=None), ensure_ascii=False) + "\n")


def read_rows(path: str | Path) -> list[Row]:
    """Reads a .jsonl file, [] where there is none; a last line cut short by a kill is dropped."""
    path = Path(path)
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    del rest  # "" after a complete last line, else what was being written when the run was killed
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}); remove the line to go on"
            ) from None
    return rows


def truncate_rows(path: str | Path, start: int) -> None:
    """Drops the rows of step >= `start`, in one atomic replacement of the file."""
    path = Path(path)
    if path.exists():
        kept = [row for row in read_rows(path) if row.get("step", -1) < start]
        partial = path.with_name(path.name + ".partial")
        partial.write_text("")
        append_rows(partial, kept)
        os.replace(partial, path)


class Writer:
    """Appends one row a step to metrics.jsonl, and to TensorBoard files when asked.

    Args:
      workdir: run directory, made if missing.
      start: first step that will be written; rows from there on are those of a run that was
        stopped after its last checkpoint, and are dropped.
      tensorboard: also write event files under workdir/tensorboard.
    """

    def __init__(self, workdir: str | Path, *, start: int = 0, tensorboard: bool = False) -> None:
        self.path = Path(workdir) / METRICS
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._events = _event_writer(Path(workdir), start) if tensorboard else None
        truncate_rows(self.path, start)

    def write(self, step: int, values: Mapping[str, Any]) -> Row:
        """Writes the row of a step, step first, and returns it with every value a float or None."""
        floats = to_floats(values)
        row = {"step": int(step)} | {k: v if math.isfinite(v) else None for k, v in floats.items()}
        append_rows(self.path, [row])
        if self._events is not None:
            for name, value in floats.items():
                self._events.add_scalar(name, value, int(step))
            self._events.flush()
        return row

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _event_writer(workdir: Path, start: int) -> Any:
    try:
        import tensorboardX
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "TensorBoard files were asked for and tensorboardX is not installed; "
            "run: pip install 'rljax[tensorboard]', or leave tensorboard off (metrics.jsonl is "
            "always written)"
        ) from None
    return tensorboardX.SummaryWriter(str(workdir / "tensorboard"), purge_step=start or None)


def to_json(value: Any, longest: int | None = 100) -> Any:
    """Describes any configuration in JSON: dataclasses by their fields, code by qualified name.

    Arrays become shape and dtype; a list of more than `longest` items its length and first item.
    """
    again = functools.partial(to_json, longest=longest)
    if isinstance(value, bool | int | str | None):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return again(value.item())
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, functools.partial):
        return {"call": again(value.func), "args": again(value.args), **again(value.keywords)}
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return f"{value.__module__}:{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {f.name: again(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"__type__": again(type(value)), **fields}
    if isinstance(value, Mapping):
        return {str(k): again(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(again, value), key=str)
    if isinstance(value, np.ndarray | jax.Array):
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, list | tuple):
        if longest is not None and len(value) > longest:
            return {"length": len(value), "first": again(value[0])}
        return [again(v) for v in value]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # no addresses: equal runs, equal text
