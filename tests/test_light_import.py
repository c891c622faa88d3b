"""`import rljax` and `import rljax.losses` stay light, seen from a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {  # each takes a noticeable part of a second, or is an optional package
    "chex",
    "flax",
    "grain",
    "jinja2",
    "math_verify",
    "optax",
    "orbax",
    "pyarrow",
    "reasoning_gym",
    "rich",
    "safetensors",
    "tensorboardX",
    "tensorflow",
    "tensorflow_datasets",
    "tokenizers",
    "torch",
    "transformers",
    "tyro",
}


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in `sys.modules` of a new process that ran `statement`."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_import_rljax_loads_nothing_but_the_standard_library():
    loaded = loaded_after("import rljax; rljax.__version__")
    assert not loaded & (HEAVY | {"jax", "numpy"})


@pytest.mark.parametrize("statement", ["import rljax.losses", "import rljax; rljax.losses"])
def test_losses_load_jax_and_nothing_heavier(statement):
    loaded = loaded_after(statement)
    assert not loaded & HEAVY


def test_an_unknown_name_says_what_there_is():
    import rljax

    with pytest.raises(AttributeError, match=r"no attribute 'lossess'.*losses"):
        rljax.lossess  # pyright: ignore[reportAttributeAccessIssue]
    assert {"load", "losses", "envs", "recipes", "testing"} <= set(dir(rljax))
