"""Rows on disk: what is written, what survives a kill, how a configuration reads in JSON."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import metrics
from rljax.types import Metric


def test_a_row_has_the_step_first_and_means_of_metrics(tmp_path):
    halves = Metric.of(jnp.array([1.0, 0.0]), jnp.ones(2)) + Metric.of(jnp.ones(1), jnp.ones(1))
    with metrics.Writer(tmp_path / "new" / "run") as writer:
        row = writer.write(3, {"reward/mean": halves, "loss": jnp.float32(0.5), "n": 7})
    text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert text.startswith('{"step": 3, ')
    assert json.loads(text) == row
    assert row["reward/mean"] == pytest.approx(2 / 3)  # (1 + 0 + 1) / 3
    assert (row["loss"], row["n"]) == (0.5, 7.0)


def test_a_value_that_is_not_finite_is_null(tmp_path):
    row = metrics.Writer(tmp_path).write(
        0, {"a": jnp.nan, "b": np.float32(np.inf), "c": -np.inf, "d": 1.0}
    )
    line = (tmp_path / "metrics.jsonl").read_text()
    assert row == json.loads(line, parse_constant=pytest.fail)
    assert row == {
        "step": 0, "a": None, "b": None, "c": None, "d": 1.0,
    }  # fmt: skip


def test_each_row_is_on_disk_when_write_returns(tmp_path):
    writer = metrics.Writer(tmp_path)
    for step in range(3):
        writer.write(step, {"x": step})
        assert len(metrics.read_rows(tmp_path / "metrics.jsonl")) == step + 1


def test_resume_drops_rows_after_the_checkpoint_and_a_cut_line(tmp_path):
    writer = metrics.Writer(tmp_path)
    for step in range(5):
        writer.write(step, {"x": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "x"')  # killed while writing
    again = metrics.Writer(tmp_path, start=3)
    again.write(3, {"x": 30})
    rows = metrics.read_rows(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["x"]) for r in rows] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]  # no partial file stays


def test_rows_without_a_step_outlive_a_resume(tmp_path):
    path = tmp_path / "samples.jsonl"
    metrics.append_rows(path, [{"text": "größer\n"}, {"step": 9, "text": ""}])
    metrics.truncate_rows(path, 9)
    assert metrics.read_rows(path) == [{"text": "größer\n"}]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2"):
        metrics.read_rows(tmp_path / "m.jsonl")


def test_a_missing_file_has_no_rows(tmp_path):
    assert metrics.read_rows(tmp_path / "none.jsonl") == []


def test_tensorboard_gets_the_same_values(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    with metrics.Writer(tmp_path, tensorboard=True) as writer:
        writer.write(4, {"reward/mean": 0.25})
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events, at = file.read_bytes(), [], 0
    while at < len(data):  # TFRecord: length u64, crc u32, bytes, crc u32
        size = int.from_bytes(data[at : at + 8], "little")
        events.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))  # type: ignore
        at += 16 + size
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert values == [(4, "reward/mean", 0.25)]


def test_tensorboard_missing_gives_the_pip_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rljax\[tensorboard\]'"):
        metrics.Writer(tmp_path, tensorboard=True)


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float
    colour: Colour = Colour.RED


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    loss: Any
    path: Path = Path("a/b")
    ids: tuple[int, ...] = (1, 2)


def test_a_configuration_reads_as_values_and_names_of_code():
    config = Outer(Inner(1e-6), functools.partial(jnp.clip, min=np.float32(0.5)))
    assert metrics.to_json(config) == {
        "__type__": f"{__name__}:Outer",
        "inner": {"__type__": f"{__name__}:Inner", "rate": 1e-6, "colour": "RED"},
        "loss": {"call": metrics.to_json(jnp.clip), "args": [], "min": 0.5},
        "path": "a/b",
        "ids": [1, 2],
    }
    assert metrics.to_json(dataclasses.replace) == "dataclasses:replace"
    assert metrics.to_json([{3, 1}, None, True, float("nan")]) == [[1, 3], None, True, None]


def test_arrays_and_long_lists_are_described_not_dumped():
    assert metrics.to_json(jnp.zeros((2, 3))) == {"shape": [2, 3], "dtype": "float32"}
    assert metrics.to_json(list(range(101))) == {"length": 101, "first": 0}
    assert metrics.to_json(list(range(100))) == list(range(100))


def test_an_unknown_object_has_no_address_in_its_text():
    one, two = metrics.to_json(object()), metrics.to_json(jax.jit(lambda x: x))
    assert one == "<object object>"
    assert "0x" not in two
