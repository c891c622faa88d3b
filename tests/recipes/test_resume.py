"""A run that is really killed goes on as if it had not been: the same bits, each step once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from rljax import metrics, trees
from rljax.checkpoint import META, Checkpoints

pytestmark = pytest.mark.slow

STEPS = 6
CONFIG = f"""
import time
from rljax import envs, policy
from rljax.data.chat import Tokenizer
from rljax.losses import algorithms, base
from rljax.models.spec import ModelConfig
from rljax.recipes import grpo
from rljax.train.optimiser import OptimiserConfig

SEEN = open("seen.txt", "a")

def reward(texts, examples):
    print(*(e.uid for e in examples[::4]), file=SEEN, flush=True)
    time.sleep(0.5)  # so that the kill falls between two checkpoints
    return [text.count("a") / 4 for text in texts]

def smooth(batch, state):
    return batch, 0.9 * state + 0.1 * batch.reward.mean()

remember = base.LossTransform(  # a loss with a state that every earlier step has shaped
    init=lambda batch: batch.reward.mean(), prepare=smooth, needs=frozenset({{"reward"}})
)

def model():
    tokenizer = Tokenizer.from_characters("abcdefghijklmn")
    cfg = ModelConfig("llama", 16, tokenizer.vocab_size, 16, 1, 2, 1, 8, 32, max_positions=64)
    return policy.scratch(cfg, tokenizer, seed=0)

config = grpo.Config(
    model=model,
    task=lambda: envs.custom(list("bcdefgh"), reward, max_tokens=4),  # 7 rows: epochs overlap
    loss=base.chain(remember, algorithms.grpo(kl=0.1)),
    steps={STEPS}, prompts=3, group=4, checkpoint_every=1, seed=0,
    optimiser=OptimiserConfig(lr=1e-2, schedule="linear", warmup_steps=2),
)
"""


def start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from rljax import cli; raise SystemExit(cli.main())", *command],
        cwd=folder, env={**os.environ, "XLA_FLAGS": ""}, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def checkpoints(folder: Path) -> list[str]:
    return sorted(p.parent.name for p in folder.glob(f"run/checkpoints/*/{META}"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a run that was never stopped, and of one killed after its second checkpoint."""
    folders = []
    for name in ("whole", "killed"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "tiny.py").write_text(CONFIG)
        folders.append(folder)
    whole, killed = folders
    assert start(whole, "train", "tiny.py", "--workdir", "run").wait(300) == 0

    process = start(killed, "train", "tiny.py", "--workdir", "run")
    deadline = time.monotonic() + 300
    while not any(int(name) >= 2 for name in checkpoints(killed)):
        assert process.poll() is None and time.monotonic() < deadline, "no second checkpoint"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert int(checkpoints(killed)[-1]) < STEPS  # else nothing was interrupted
    (killed / "seen.txt").rename(killed / "seen_before.txt")
    assert start(killed, "resume", "run").wait(300) == 0
    return whole, killed


def test_the_final_state_is_the_same_bit_for_bit(runs):
    # Parameters, moments, optimiser count, loss state and step, as the arrays lie on the disk.
    whole, killed = (load(folder) for folder in runs)
    assert whole.keys() == killed.keys() and len(whole) > 20
    for name, x in whole.items():
        np.testing.assert_array_equal(killed[name], x, err_msg=name)
    [memory] = [x for name, x in whole.items() if name.startswith("loss_state")]
    assert memory > 0


def load(folder: Path) -> dict[str, np.ndarray]:
    saved = Checkpoints(folder / "run" / "checkpoints")
    assert saved.latest() == STEPS
    found = saved._saved(STEPS)  # names and shapes as they lie on the disk
    like = trees.unflatten({k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in found.items()})
    return {k: np.asarray(x) for k, x in trees.flatten(saved.restore(STEPS, like)).items()}


def test_the_rows_after_the_kill_come_in_the_same_order(runs):
    whole, killed = runs
    lines = (whole / "seen.txt").read_text().splitlines()
    again = (killed / "seen.txt").read_text().splitlines()
    assert len(lines) == STEPS and 0 < len(again) < STEPS
    assert again == lines[-len(again) :]


def test_every_step_has_one_row_and_the_same_numbers(runs):
    # kl/reference too: the reference of the resumed run is the initial policy, whose distance grows
    # from 0; measured from the checkpoint it would start at 0 again.
    whole, killed = (metrics.read_rows(folder / "run" / "metrics.jsonl") for folder in runs)
    assert [r["step"] for r in whole] == [r["step"] for r in killed] == list(range(STEPS))
    for a, b in zip(whole, killed, strict=True):
        for name in a:
            if not name.startswith(("time", "speed", "compile")):
                assert a[name] == b[name], (a["step"], name)
    assert whole[-1]["kl/reference"] > 0.0


def test_both_processes_record_their_versions(runs):
    lines = (runs[1] / "run" / "versions.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all(json.loads(line) for line in lines)
