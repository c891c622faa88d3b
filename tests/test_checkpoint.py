"""Checkpoints: exact values, survival of a kill or a full disk, other meshes, clear refusals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax import checkpoint, trees
from rljax.checkpoint import CheckpointError, Checkpoints
from rljax.train.state import TrainState


def make_state(scale: float = 1.0, width: int = 3) -> TrainState:
    """A small state with everything a real one has: optax tuples, a loss state, a key."""
    rng = np.random.default_rng(0)
    w = scale * rng.standard_normal((5, width))
    params = {"embed": jnp.asarray(w, jnp.float32), "layers": {"q": jnp.full((2, 4), 0.1)}}
    return TrainState(
        params=params,
        opt_state=optax.adamw(1e-3).init(params),
        loss_state=({"beta": jnp.float32(0.2)}, (), {"key": jax.random.key(7)}),
        step=jnp.int32(12),
    )


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def bits(tree: Any) -> list[bytes]:
    as_data = {
        k: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for k, x in trees.flatten(tree).items()
    }
    return [np.asarray(x).tobytes() for x in as_data.values()]


def run_python(code: str, *args: Any, devices: int = 1) -> subprocess.CompletedProcess[str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )


def test_a_state_comes_back_bit_for_bit(tmp_path):
    state = make_state(scale=1e-30)  # near the smallest float32, where a detour would show
    saved = Checkpoints(tmp_path / "c")
    saved.save(12, state, {"position": 96, "version": 12})

    again = Checkpoints(tmp_path / "c")
    back = again.restore(12, abstract(state))

    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert bits(back) == bits(state)
    assert back.loss_state[2]["key"].dtype == state.loss_state[2]["key"].dtype
    assert again.meta(12) == {"position": 96, "version": 12}


def test_the_newest_are_kept_and_the_rest_removed(tmp_path):
    saved = Checkpoints(tmp_path, keep=2)
    assert saved.latest() is None
    for step in (0, 10, 20):
        saved.save(step, {"w": jnp.full(3, step)})

    assert saved.steps() == [10, 20] and saved.latest() == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000010", "00000020"]
    np.testing.assert_array_equal(saved.restore(10, {"w": jnp.zeros(3, jnp.int32)})["w"], 10)


def test_parameters_are_read_alone_and_cast(tmp_path):
    state = make_state()
    saved = Checkpoints(tmp_path)
    saved.save(3, state)

    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), state.params)
    params = saved.restore_params(3, like)

    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    assert bits(params) == bits(expected)


def with_params(state: TrainState, **changes: jax.Array) -> TrainState:
    return state.replace(params={**state.params, **changes})


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda s: with_params(s, embed=jnp.zeros((5, 4))), r"params/embed.*\(5, 3\).*\(5, 4\)"),
        (lambda s: s.replace(step=jnp.float32(0)), r"step is int32, here float32"),
        (lambda s: s.replace(loss_state=()), r"has.*2 arrays \(loss_state/0/beta, loss_state/2"),
        (lambda s: with_params(s, head=jnp.zeros(2)), r"lacks 1 arrays \(params/head\)"),
    ],
)
def test_a_state_of_another_run_is_refused_by_leaf(tmp_path, change, fact):
    state = make_state()
    saved = Checkpoints(tmp_path)
    saved.save(1, state)
    with pytest.raises(ValueError, match=fact + ".*start a new run"):
        saved.restore(1, abstract(change(state)))


def test_parameters_of_another_model_are_refused_by_leaf(tmp_path):
    saved = Checkpoints(tmp_path)
    saved.save(1, make_state())
    with pytest.raises(ValueError, match=r"params/embed has shape \(5, 3\), here \(5, 9\)"):
        saved.restore_params(1, make_state(width=9).params)


def test_a_missing_step_names_those_there_are(tmp_path):
    saved = Checkpoints(tmp_path)
    saved.save(4, {"w": jnp.zeros(2)})
    with pytest.raises(FileNotFoundError, match=r"step 5; it has \[4\]"):
        saved.restore(5, {"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match="already has a checkpoint of step 4"):
        saved.save(4, {"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"no JSON.*int\(\)"):
        saved.save(6, {"w": jnp.zeros(2)}, {"position": jnp.int32(1)})
    assert saved.steps() == [4]


KILLED = """
import os, signal, sys, threading, time, types
import jax.numpy as jnp
from rljax import checkpoint

folder, moment = sys.argv[1:]
saved = checkpoint.Checkpoints(folder, keep=1)
saved.save(1, {"w": jnp.arange(4.0)}, {"position": 1})
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if moment == "writing":
    def watch():
        while not os.path.exists(f"{folder}/00000002/state.orbax-checkpoint-tmp"):
            time.sleep(1e-4)
        die()
    threading.Thread(target=watch).start()
elif moment == "written":  # the arrays are there, meta.json is not
    os.replace = die
elif moment == "removing":  # the old one is half removed
    checkpoint.shutil = types.SimpleNamespace(rmtree=die)
saved.save(2, {"w": jnp.ones((256, 1024))}, {"position": 2})
"""


@pytest.mark.parametrize(("moment", "latest"), [("writing", 1), ("written", 1), ("removing", 2)])
def test_a_kill_leaves_a_complete_checkpoint(tmp_path, moment, latest):
    killed = run_python(KILLED, tmp_path, moment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    saved = Checkpoints(tmp_path, keep=1)
    assert saved.steps() == [latest]
    assert saved.meta(latest) == {"position": latest}
    values = {1: jnp.arange(4.0), 2: jnp.ones((256, 1024))}[latest]
    np.testing.assert_array_equal(saved.restore(latest, {"w": values})["w"], values)
    saved.save(3, {"w": values})  # and the next save clears the debris
    assert [p.name for p in tmp_path.iterdir()] == ["00000003"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 160 kB, or a skip where it may not be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root on Linux")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_explained_and_the_last_checkpoint_stays(small_disk, caplog):
    saved = Checkpoints(small_disk)
    saved.save(1, {"w": jnp.arange(3.0)})
    noise = jnp.asarray(np.random.default_rng(0).standard_normal(60_000), jnp.float32)

    with pytest.raises(CheckpointError) as caught:
        saved.save(2, {"w": noise})

    text = str(caught.value)
    assert "step 2 could not be written" in text and "No space left on device" in text
    assert "240 kB" in text and "step 1; it is intact" in text and "\n" not in text
    assert caplog.records == []  # nor do the writing threads log their tracebacks
    np.testing.assert_array_equal(saved.restore(1, {"w": jnp.zeros(3)})["w"], [0, 1, 2])
    saved.save(3, {"w": jnp.ones(3)})  # the room of the failed one is free again
    assert saved.steps() == [1, 3]


def test_an_unwritable_folder_is_explained(tmp_path, monkeypatch):
    def fail(path, tree):
        raise PermissionError(13, "Permission denied", str(path))

    saved = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoint, "_write", fail)
    with pytest.raises(
        CheckpointError, match=r"Permission denied.*no earlier checkpoint.*writable"
    ):
        saved.save(1, {"w": jnp.zeros(3)})
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_the_state_is_no_disk_error(tmp_path, monkeypatch):
    def fail(path, tree):
        raise ValueError("unsupported leaf")

    monkeypatch.setattr(checkpoint, "_write", fail)
    with pytest.raises(ValueError, match="unsupported leaf"):
        Checkpoints(tmp_path).save(1, {"w": jnp.zeros(3)})


def test_a_run_whose_checkpoints_will_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_free_bytes", lambda folder: 250_000)
    saved = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    saved.check_space(80_000)  # 3 x 80 kB: two kept and one being written
    with pytest.raises(CheckpointError, match=r"250 kB free.*takes 100 kB and 3 more.*free 50 kB"):
        saved.check_space(100_000)
    for step in (1, 2):
        saved.save(step, {"w": jnp.zeros(3)})
    saved.check_space(100_000)  # a resumed run adds one before it removes one


def test_a_url_is_refused():
    with pytest.raises(ValueError, match="mounted"):
        Checkpoints("gs://bucket/run")


OTHER_MESH = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from rljax.checkpoint import Checkpoints

def mesh(*shape):
    return jax.make_mesh(shape, ("fsdp", "tensor"))

w = jnp.arange(16 * 24, dtype=jnp.float32).reshape(16, 24)
saved = Checkpoints(sys.argv[1])
saved.save(1, {"params": {"w": jax.device_put(w, NamedSharding(mesh(4, 2), P("fsdp", "tensor")))}})
target = NamedSharding(mesh(2, 4), P("tensor", None))
like = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=target)
whole = saved.restore(1, {"params": {"w": like}})["params"]
for tree in (whole, saved.restore_params(1, {"w": like})):
    assert tree["w"].sharding == target, tree["w"].sharding
    assert tree["w"].addressable_shards[0].data.shape == (4, 24)
    assert np.array_equal(tree["w"], w)
"""


def test_a_sharded_state_moves_to_another_mesh(tmp_path):
    done = run_python(OTHER_MESH, tmp_path, devices=8)
    assert done.returncode == 0, done.stderr
    w = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)  # and here to one device
    back = Checkpoints(tmp_path).restore_params(1, {"w": jnp.zeros((16, 24))})["w"]
    np.testing.assert_array_equal(back, w)
