"""What a run directory says about where the run came from."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import jax
import pytest

from rljax import metrics, provenance


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.1


def test_a_run_keeps_values_text_and_versions(tmp_path):
    provenance.save_config(Config(), tmp_path / "run", "config = Config()  # 0.1\n")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["rate"] == 0.1
    assert (tmp_path / "run" / "config.py").read_text() == "config = Config()  # 0.1\n"
    (row,) = metrics.read_rows(tmp_path / "run" / "versions.jsonl")
    assert row["packages"]["jax"] == jax.__version__
    assert "cores" in row["machine"]


def test_each_start_adds_a_line(tmp_path):
    provenance.write_versions(tmp_path)
    provenance.write_versions(tmp_path)
    assert len(metrics.read_rows(tmp_path / "versions.jsonl")) == 2


def test_the_commit_is_the_head_of_our_repository():
    commit = provenance.git_commit()
    if commit is None:
        pytest.skip("the tests run outside a git clone")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert commit.removesuffix("-dirty") == head.stdout.strip()


def test_no_repository_is_no_commit(monkeypatch, tmp_path):
    (tmp_path / "rljax").mkdir()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "rljax" / "provenance.py"))
    assert provenance.git_commit() is None
