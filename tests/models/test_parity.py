"""Logits of tiny random models against transformers, stored by tests/golden/make_parity.py.

The files go the way of a user's model: a folder with config.json and safetensors, read by
`families` and `hf`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from rljax.models import decoder, families, heads, hf

FOLDER = Path(__file__).parent.parent / "golden" / "parity"
CONFIGS = {f.stem: json.loads(str(np.load(f)["configs"])) for f in sorted(FOLDER.glob("*.npz"))}
CASES = [(family, variant) for family, configs in CONFIGS.items() for variant in configs]


def test_every_family_is_covered():
    assert set(CONFIGS) == set(families.FAMILIES)


def write_folder(folder, family, variant):
    """Writes the case as a model folder; returns the stored file."""
    stored = np.load(FOLDER / f"{family}.npz")
    config = CONFIGS[family][variant]["4"]
    tied = families.from_hf(config).tied
    tensors = {k.removeprefix("tensor/"): stored[k] for k in stored if k.startswith("tensor/")}
    if tied:
        tensors.pop("lm_head.weight", None)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return stored


# thirty programs that run once each: half the time to compile, the same numbers
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
UNROLLED = [(family, list(configs)[-1], "unrolled") for family, configs in CONFIGS.items()]


@pytest.mark.parametrize(
    ("family", "variant", "form"), [(*case, "stacked") for case in CASES] + UNROLLED
)
def test_logits_equal_those_of_transformers(tmp_path, family, variant, form):
    stored = write_folder(tmp_path, family, variant)
    cfg = hf.load_config(tmp_path)
    params = hf.load_params(tmp_path, cfg)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def logits(params, ids):
        tree = decoder.expand(params, cfg, form, fuse=form == "unrolled")
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        x, _ = decoder.hidden(tree, cfg, ids, positions, decoder.causal(cfg))
        return heads.logits(tree, cfg, x)

    expected = stored[f"logits/{variant}"]
    got = np.asarray(logits(params, jnp.asarray(stored["ids"])))
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_config_as_rewritten_by_transformers_5_reads_the_same(family, variant):
    config = CONFIGS[family][variant]
    assert families.from_hf(config["5"]) == families.from_hf(config["4"])
    assert families.from_hf(families.to_hf(families.from_hf(config["4"]))) == families.from_hf(
        config["4"]
    )


LOAD = """
import json, sys, pathlib, numpy as np, torch, transformers
worst = {}
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    stored = np.load(folder / "stored.npz")
    with torch.no_grad():
        got = model(torch.tensor(stored["ids"].astype(np.int64))).logits.numpy()
    expected = stored["logits"]
    worst[folder.name] = float(np.abs(got - expected).max() / np.abs(expected).max())
print(json.dumps(worst))
"""


def test_export_loads_in_transformers(tmp_path):
    """What `save_params` writes gives the stored logits in transformers again."""
    python = os.environ.get("RLJAX_TORCH_PYTHON")
    if not python:
        pytest.skip("set RLJAX_TORCH_PYTHON to a Python with torch and transformers")
    for family, variant in CASES:
        source, folder = tmp_path / "in", tmp_path / "out" / f"{family}.{variant}"
        source.mkdir(exist_ok=True)
        stored = write_folder(source, family, variant)
        cfg = hf.load_config(source)
        hf.save_params(hf.load_params(source, cfg), cfg, folder)
        np.savez(folder / "stored.npz", ids=stored["ids"], logits=stored[f"logits/{variant}"])
    command = [python, "-c", LOAD, str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    worst = json.loads(run.stdout.splitlines()[-1])
    assert set(worst) == {f"{family}.{variant}" for family, variant in CASES}
    assert max(worst.values()) <= 1e-4, worst
