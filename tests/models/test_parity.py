"""Logits of tiny random models against transformers, stored by tests/golden/make_parity.py.

The files go the way of a user's model: a folder with config.json and safetensors, read by
`families` and `hf`.
"""

from __future__ import annotations

import json
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


SCANNED = [(family, list(configs)[-1], "stacked") for family, configs in CONFIGS.items()]


@pytest.mark.parametrize(
    ("family", "variant", "form"), [(*case, "unrolled") for case in CASES] + SCANNED
)
def test_logits_equal_those_of_transformers(tmp_path, family, variant, form):
    stored = write_folder(tmp_path, family, variant)
    cfg = hf.load_config(tmp_path)
    params = hf.load_params(tmp_path, cfg)

    @jax.jit
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
