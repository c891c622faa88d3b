"""GGUF files, written by the `gguf` package (llama.cpp's own), read by ours."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import trees
from rljax.models import families, gguf, hf, layers, spec

if importlib.util.find_spec("gguf") is None:
    pytest.skip("needs the gguf package (pip install gguf) to write files", allow_module_level=True)
import gguf as reference

QUANTISABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
RAW_ONLY = ["Q4_K", "Q5_K", "Q6_K"]  # the package reads these and cannot write them


@pytest.mark.parametrize("name", QUANTISABLE)
def test_dequantised_weights_equal_the_gguf_packages(name):
    """Bit for bit; weights of very different sizes, and a block of zeros."""
    x = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    x *= np.float32(10.0) ** np.arange(-3, 3, dtype=np.float32)[:, None]
    x[2, 32:64] = 0
    kind = reference.GGMLQuantizationType[name]
    stored = reference.quants.quantize(x, kind)
    expected = reference.quants.dequantize(stored, kind)
    ours = gguf.KINDS[int(kind)]
    assert ours.name == name and (ours.weights, ours.bytes) == reference.GGML_QUANT_SIZES[kind]
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(-1, ours.bytes)
    got = ours.dequantise(raw).reshape(x.shape)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)
    assert (np.abs(got - x).max(1) < 0.15 * np.abs(x).max(1)).all()


@pytest.mark.parametrize("name", [*QUANTISABLE[3:], *RAW_ONLY])
def test_random_blocks_dequantise_as_in_the_gguf_package(name):
    """Bit for bit on blocks of random bytes: every packed bit counts."""
    kind = reference.GGMLQuantizationType[name]
    ours = gguf.KINDS[int(kind)]
    assert (ours.weights, ours.bytes) == reference.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(1)
    raw = generator.integers(0, 256, (70, ours.bytes), np.uint8)
    scales = generator.standard_normal((70, 2)).astype(np.float16).view(np.uint8)
    if name == "Q6_K":
        raw[:, -2:] = scales[:, :2]  # finite factors: random bytes may be a NaN
    else:
        n = 4 if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        raw[:, :n] = scales[:, :n]
    expected = reference.quants.dequantize(raw, kind).reshape(70, ours.weights)
    np.testing.assert_array_equal(ours.dequantise(raw), expected)


LLAMA = spec.ModelConfig(
    family="llama", vocab_size=37, vocab_used=37, width=32, layers=2, heads=4, kv_heads=2,
    head_size=8, mlp=64, tied=False, max_positions=128, rope_theta=1e5,
)  # fmt: skip
_GEMMA = {"tied": True, "norm_plus_one": True, "activation": "gelu_tanh", "embed_scale": 32**0.5}
CONFIGS = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, tied=True),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, head_size=16),
    "gemma": dataclasses.replace(LLAMA, family="gemma", **_GEMMA),
    "gemma2": dataclasses.replace(
        LLAMA, family="gemma2", post_norms=True, window=16, local=(True, False),
        attention_softcap=50.0, logit_softcap=30.0, **_GEMMA,
    ),
    "gemma3": dataclasses.replace(
        LLAMA, family="gemma3_text", post_norms=True, qk_norm=True, window=16, local=(True, True),
        rope_theta_local=1e4, rope_scaling=spec.RopeScaling("linear", 8.0), **_GEMMA,
    ),
}  # fmt: skip


def randomise(cfg):
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda p: jnp.asarray(generator.standard_normal(p.shape), jnp.float32),
        spec.specs(cfg), is_leaf=spec.is_param,
    )  # fmt: skip


def hf_tensors(params, cfg, folder):
    """{Hugging Face name: array}, through our own export."""
    hf.save_params(params, cfg, folder)
    return hf.read_folder(folder)


def convert(name, x, arch, cfg):
    """What llama.cpp's convert_hf_to_gguf.py does to a tensor: name and values."""
    mapping = reference.get_tensor_name_map(reference.MODEL_ARCH[arch.upper()], cfg.layers)
    if arch == "llama" and ("q_proj.weight" in name or "k_proj.weight" in name):
        heads = cfg.heads if "q_proj" in name else cfg.kv_heads
        x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)  # its `permute`
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        x = x + 1
    found = mapping.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found, np.ascontiguousarray(x)


def write(path, arch, cfg, tensors, kind="F32", **extra):
    """A file as convert_hf_to_gguf.py writes it; norms and biases stay in float32."""
    w = reference.GGUFWriter(path, arch)
    w.add_block_count(cfg.layers)
    w.add_context_length(cfg.max_positions)
    w.add_embedding_length(cfg.width)
    w.add_feed_forward_length(cfg.mlp)
    w.add_head_count(cfg.heads)
    w.add_head_count_kv(cfg.kv_heads)
    w.add_layer_norm_rms_eps(cfg.norm_eps)
    w.add_rope_freq_base(cfg.rope_theta)
    w.add_key_length(cfg.head_size)
    w.add_value_length(cfg.head_size)
    if cfg.window:
        w.add_sliding_window(cfg.window)
    if cfg.attention_softcap:
        w.add_attn_logit_softcapping(cfg.attention_softcap)
    if cfg.logit_softcap:
        w.add_final_logit_softcapping(cfg.logit_softcap)
    if cfg.rope_scaling and cfg.rope_scaling.kind != "llama3":
        w.add_rope_scaling_type(reference.RopeScalingType(cfg.rope_scaling.kind))
        w.add_rope_scaling_factor(cfg.rope_scaling.factor)
        if cfg.rope_scaling.kind == "yarn":
            w.add_rope_scaling_orig_ctx_len(cfg.rope_scaling.original_positions)
    for key, value in extra.items():
        if isinstance(value, np.ndarray):
            w.add_tensor(key.replace("__", "."), value)
        elif isinstance(value, list):
            w.add_array(key.replace("__", "."), value)
        else:
            w.add_uint32(key.replace("__", "."), value)
    for name, x in tensors.items():
        name, x = convert(name, x, arch, cfg)
        stored = kind if x.ndim > 1 else "F32"
        stored = reference.GGMLQuantizationType[stored]
        w.add_tensor(name, reference.quants.quantize(x, stored), raw_dtype=stored)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("arch", CONFIGS)
def test_file_gives_the_config_and_parameters_it_was_made_of(tmp_path, arch):
    cfg = CONFIGS[arch]
    params = randomise(cfg)
    path = write(tmp_path / "m.gguf", arch, cfg, hf_tensors(params, cfg, tmp_path))
    assert gguf.config(path) == cfg
    got = trees.flatten(gguf.load_params(path))
    for name, x in trees.flatten(params).items():
        # (w + 1) - 1 of Gemma's norms rounds once
        tolerance = 3e-7 if cfg.norm_plus_one and name.endswith("norm") else 0.0
        np.testing.assert_allclose(got[name], x, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_quantised_file_is_near_its_source(tmp_path, kind):
    """Bounds: half a step of a block of 32 normal weights (range about 5) in 4, 5 or 8 bits."""
    cfg = CONFIGS["qwen2"]
    params = randomise(cfg)
    path = write(tmp_path / "m.gguf", "qwen2", cfg, hf_tensors(params, cfg, tmp_path), kind)
    bound = {"F32": 0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2}.get(
        kind, 0.5 if "4" in kind else 0.25
    )
    got = gguf.load_params(path, dtype=jnp.float32)
    error = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), got, params)
    assert max(jax.tree.leaves(error)) <= bound
    assert error["final_norm"] == 0


def test_mistral_in_a_llama_file_keeps_its_window(tmp_path):
    cfg = dataclasses.replace(LLAMA, family="mistral", window=24, local=(True, True))
    path = write(tmp_path / "m.gguf", "llama", cfg, hf_tensors(randomise(LLAMA), LLAMA, tmp_path))
    assert gguf.config(path) == cfg


@pytest.mark.parametrize("large", [False, True])
def test_gemma2_27b_scales_queries_by_width_over_heads(tmp_path, large):
    """llama.cpp: gemma2 with 46 blocks is the 27B model, 1 / sqrt(n_embd / n_head)."""
    cfg = dataclasses.replace(CONFIGS["gemma2"], head_size=16)
    path = write(tmp_path / "m.gguf", "gemma2", cfg, hf_tensors(randomise(cfg), cfg, tmp_path))
    file = gguf.read(path)
    if large:
        file.metadata["gemma2.block_count"] = 46
    assert gguf.config(file).scale == pytest.approx((32 // 4 if large else 16) ** -0.5)


def test_yarn_is_read(tmp_path):
    cfg = dataclasses.replace(CONFIGS["qwen2"], rope_scaling=spec.RopeScaling("yarn", 4.0, 32))
    path = write(tmp_path / "m.gguf", "qwen2", cfg, hf_tensors(randomise(cfg), cfg, tmp_path))
    assert gguf.config(path) == cfg


def llama3_divisors(size, theta, factor, low=1.0, high=4.0, original=8192):
    """As convert_hf_to_gguf.py's LlamaModel.generate_extra_tensors computes rope_freqs."""
    out = []
    for i in range(0, size, 2):
        wavelength = 2 * np.pi * theta ** (i / size)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_llama3_scaling_is_recognised_by_its_tensor(tmp_path):
    cfg = dataclasses.replace(
        LLAMA, head_size=64, rope_theta=5e5, rope_scaling=spec.RopeScaling("llama3", 32.0, 8192)
    )
    tensors = hf_tensors(randomise(cfg), cfg, tmp_path)
    divisors = llama3_divisors(64, 5e5, 32.0)
    assert ((divisors > 1) & (divisors < 32)).any()  # the blend is exercised
    path = write(tmp_path / "m.gguf", "llama", cfg, tensors, rope_freqs__weight=divisors)
    assert gguf.config(path) == cfg
    plain, _ = layers.rope_frequencies(64, 5e5, None)
    scaled, _ = layers.rope_frequencies(64, 5e5, gguf.config(path).rope_scaling)
    np.testing.assert_allclose(plain / scaled, divisors, rtol=1e-6)
    assert trees.count(gguf.load_params(path)) == trees.count(spec.abstract(spec.specs(cfg)))
    other = llama3_divisors(64, 5e5, 32.0, high=2.0)
    path = write(tmp_path / "o.gguf", "llama", cfg, tensors, rope_freqs__weight=other)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        gguf.config(path)


def test_head_equal_to_the_embedding_is_one_parameter(tmp_path):
    """FC71: llama2.c's converter stores a tied head twice."""
    cfg = dataclasses.replace(LLAMA, tied=True)
    params = randomise(cfg)
    tensors = hf_tensors(params, cfg, tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    path = write(tmp_path / "m.gguf", "llama", cfg, tensors)
    assert gguf.config(path).tied and "head" not in gguf.load_params(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    path = write(tmp_path / "u.gguf", "llama", cfg, tensors)
    assert not gguf.config(path).tied and "head" in gguf.load_params(path)


def test_padded_vocabulary_is_not_used(tmp_path):
    """FC73: converters pad the token list to the rows of the embedding with "[PAD35]", ..."""
    tokens = [f"t{i}" for i in range(34)] + ["[PAD34]", "[PAD35]", "[PAD36]"]
    tensors = hf_tensors(randomise(LLAMA), LLAMA, tmp_path)
    path = write(tmp_path / "m.gguf", "llama", LLAMA, tensors, tokenizer__ggml__tokens=tokens)
    cfg = gguf.config(path)
    assert (cfg.vocab_size, cfg.vocab_used) == (37, 34)


def test_unknown_quantisation_is_refused_by_tensor_and_kind(tmp_path):
    tensors = hf_tensors(randomise(LLAMA), LLAMA, tmp_path)
    file = gguf.read(write(tmp_path / "m.gguf", "llama", LLAMA, tensors))
    file.tensors["blk.1.ffn_up.weight"] = dataclasses.replace(
        file.tensors["blk.1.ffn_up.weight"], kind=16
    )
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight .* kind 16.*Q4_K"):
        gguf.load_params(file)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama__expert_count": 8}, r"llama\.expert_count"),
        ({"llama__rope__dimension_count": 4}, r"llama\.rope\.dimension_count"),
        ({"llama__residual_scale": 2}, r"llama\.residual_scale"),
    ],
)
def test_metadata_that_is_not_computed_is_refused_by_name(tmp_path, extra, message):
    tensors = hf_tensors(randomise(LLAMA), LLAMA, tmp_path)
    path = write(tmp_path / "m.gguf", "llama", LLAMA, tensors, **extra)
    with pytest.raises(ValueError, match=message):
        gguf.config(path)


def test_unused_and_missing_tensors_are_named(tmp_path):
    tensors = hf_tensors(randomise(LLAMA), LLAMA, tmp_path)
    path = write(
        tmp_path / "m.gguf", "llama", LLAMA, tensors, blk__0__surprise__weight=np.ones(3, "f")
    )
    with pytest.raises(ValueError, match=r"unused tensors blk\.0\.surprise\.weight"):
        gguf.load_params(path)
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    path = write(tmp_path / "m2.gguf", "llama", LLAMA, tensors)
    with pytest.raises(ValueError, match=r"lack tensors model\.layers\.1\.mlp\.down_proj"):
        gguf.load_params(path)


def test_damaged_files_are_refused(tmp_path):
    path = write(tmp_path / "m.gguf", "llama", LLAMA, hf_tensors(randomise(LLAMA), LLAMA, tmp_path))
    whole = path.read_bytes()
    bad = tmp_path / "bad.gguf"
    with pytest.raises(FileNotFoundError, match=r"bad\.gguf"):
        gguf.read(bad)
    for content, message in (
        (b"PK" + whole[2:], "does not start with GGUF"),
        (whole[:4] + b"\x01" + whole[5:], "version 1"),
        (whole[:300], "damaged or cut short"),
        (whole[:-4], "cut short"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            gguf.load_params(bad)


def test_reading_needs_no_gguf_package(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", "llama", LLAMA, hf_tensors(randomise(LLAMA), LLAMA, tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert gguf.config(path) == LLAMA


def test_config_of_a_file_can_be_exported(tmp_path):
    path = write(tmp_path / "m.gguf", "llama", LLAMA, hf_tensors(randomise(LLAMA), LLAMA, tmp_path))
    config = json.loads(json.dumps(families.to_hf(gguf.config(path))))
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0


def test_stories_file_equals_its_hugging_face_folder(shared):
    """The same model, converted by its publisher and by us from the llama2.c checkpoint."""
    file = gguf.read(shared("data/models/stories260K.gguf"))
    folder = shared("data/models/stories260k_hf")
    cfg = gguf.config(file)
    assert dataclasses.replace(cfg, max_positions=512) == hf.load_config(folder)  # 2048 in the file
    ours, theirs = gguf.load_params(file, cfg), hf.load_params(folder, cfg)
    assert trees.count(ours) == 260_032
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), ours, theirs))
