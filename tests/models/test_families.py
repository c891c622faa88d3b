"""config.json to ModelConfig and back; fields as in the models' published config.json files."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rljax.models import families

COMMON = {
    "torch_dtype": "bfloat16", "transformers_version": "4.46.0", "use_cache": True,
    "initializer_range": 0.02, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [1, 2],
}  # fmt: skip

PUBLISHED = {
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "transformers.js_config": {}, "vocab_size": 49152,
    },
    "Llama-3.2-1B": {
        "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "tie_word_embeddings": True, "vocab_size": 128256,
    },
    "Mistral-7B-v0.1": {
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Qwen2.5-0.5B": {
        "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma-2b": {
        "attention_bias": False, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048,
        "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
    },
    "gemma-2-27b": {
        "attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "intermediate_size": 36864,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 32,
        "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
        "vocab_size": 256000, "_attn_implementation": "eager",
    },
    "gemma-3-1b-it": {
        "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    },
}  # fmt: skip
PUBLISHED = {name: {**COMMON, **fields} for name, fields in PUBLISHED.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_and_written_back(name):
    cfg = families.from_hf(PUBLISHED[name])
    assert families.from_hf(families.to_hf(cfg)) == cfg


def read(name, **changes):
    return families.from_hf({**PUBLISHED[name], **changes})


def test_families_differ_by_their_switches():
    smol, gemma = read("SmolLM2-135M-Instruct"), read("gemma-2b")
    assert (smol.layers, smol.heads, smol.kv_heads, smol.head_size) == (30, 9, 3, 64)
    assert smol.tied and smol.rope_theta == 100_000 and not smol.local
    assert gemma.tied and gemma.norm_plus_one and gemma.activation == "gelu_tanh"
    assert gemma.embed_scale == math.sqrt(2048) and gemma.scale == 256**-0.5
    assert read("Qwen2.5-0.5B").qkv_bias and not read("Qwen3-0.6B").qkv_bias
    assert read("Qwen3-0.6B").qk_norm and read("Qwen3-0.6B").head_size == 128


def test_mistral_attends_within_its_window_in_every_layer():
    cfg = read("Mistral-7B-v0.1")
    assert cfg.window == 4096 and cfg.local == (True,) * 32
    assert read("Mistral-7B-v0.1", sliding_window=None).local == ()


def test_gemma2_alternates_and_gemma3_is_global_every_sixth_layer():
    two, three = read("gemma-2-27b"), read("gemma-3-1b-it")
    assert two.local[:3] == (True, False, True) and two.window == 4096
    assert (two.attention_softcap, two.logit_softcap) == (50.0, 30.0)
    assert two.scale == pytest.approx(1 / 12)  # 144 ** -0.5, although the head size is 128
    assert [i for i, local in enumerate(three.local) if not local] == [5, 11, 17, 23]
    assert (three.rope_theta, three.rope_theta_local, three.window) == (1e6, 1e4, 512)
    kinds = ["full_attention"] * 25 + ["sliding_attention"]
    assert read("gemma-3-1b-it", layer_types=kinds).local == (False,) * 25 + (True,)


def test_qwen_windows_its_last_layers_only_when_told():
    assert read("Qwen2.5-0.5B").local == ()
    cfg = read("Qwen2.5-0.5B", use_sliding_window=True, max_window_layers=22)
    assert cfg.local == (False,) * 22 + (True, True) and cfg.window == 32768
    assert families.from_hf(families.to_hf(cfg)) == cfg


def test_rope_parameters_of_transformers_5_equal_rope_scaling_of_4():
    old = dict(PUBLISHED["Llama-3.2-1B"])
    new = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": 500000.0}
    assert families.from_hf(new) == families.from_hf(old)
    old = PUBLISHED["gemma-3-1b-it"] | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gone = ("rope_scaling", "rope_theta", "rope_local_base_freq")
    new = {k: v for k, v in old.items() if k not in gone}
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert families.from_hf(new) == families.from_hf(old)
    assert families.from_hf(new).rope_scaling == families.spec.RopeScaling("linear", 8.0)


def test_yarn_reads_its_attention_factor():
    def yarn(**more):
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **more}
        cfg = read("Qwen2.5-0.5B", rope_scaling=scaling)
        assert families.from_hf(families.to_hf(cfg)) == cfg
        assert cfg.rope_scaling is not None
        return cfg.rope_scaling

    assert yarn().attention_factor is None and yarn().original_positions == 32768
    assert yarn(attention_factor=0.7).attention_factor == 0.7
    # DeepSeek: the ratio of two temperatures, each 0.1 m ln(factor) + 1
    expected = (0.1 * 0.5 * math.log(4) + 1) / (0.1 * 2.0 * math.log(4) + 1)
    assert yarn(mscale=0.5, mscale_all_dim=2.0).attention_factor == pytest.approx(expected)
    assert yarn(mscale=1.0).attention_factor is None


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("SmolLM2-135M-Instruct", "attention_bias", True),
        ("SmolLM2-135M-Instruct", "mlp_bias", True),
        ("SmolLM2-135M-Instruct", "hidden_act", "relu"),
        ("SmolLM2-135M-Instruct", "rope_interleaved", True),
        ("SmolLM2-135M-Instruct", "partial_rotary_factor", 0.5),
        ("SmolLM2-135M-Instruct", "logit_scale", 2.0),  # a field of another family
        ("SmolLM2-135M-Instruct", "quantization_config", {"bits": 4}),
        ("SmolLM2-135M-Instruct", "sliding_window", 128),  # Llama has none
        ("Qwen2.5-0.5B", "use_mrope", True),
        ("gemma-3-1b-it", "use_bidirectional_attention", True),
        ("gemma-3-1b-it", "attn_logit_softcapping", 50.0),
        ("gemma-3-1b-it", "layer_types", ["chunked_attention"] * 26),
    ],
)
def test_a_field_that_is_not_computed_is_refused_by_name(name, field, value):
    with pytest.raises(ValueError, match=field):
        read(name, **{field: value})


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "longrope", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0, "surprise": 1},
        {"rope_type": "yarn", "factor": 2.0, "truncate": False},
        {"rope_type": "llama3", "factor": 2.0},
        {"rope_type": "default", "mrope_section": [1, 2]},
    ],
)
def test_rotary_scaling_that_is_not_computed_is_refused(scaling):
    with pytest.raises(ValueError, match=r"rotary|truncate"):
        read("Llama-3.2-1B", rope_scaling=scaling)


def test_unknown_family_and_missing_field_are_named():
    with pytest.raises(ValueError, match=r"'mamba'.*llama"):
        families.from_hf({"model_type": "mamba"})
    config = {k: v for k, v in PUBLISHED["Qwen3-0.6B"].items() if k != "intermediate_size"}
    with pytest.raises(ValueError, match="intermediate_size"):
        families.from_hf(config)


def test_vocab_used_comes_from_the_tokenizer():
    assert read("Qwen2.5-0.5B").vocab_used == 151936
    assert families.from_hf(PUBLISHED["Qwen2.5-0.5B"], vocab_used=151665).vocab_used == 151665
    cfg = families.with_vocab(read("gemma-3-1b-it"), 262145)  # one id more than the model has rows
    assert cfg.vocab_used == 262144


def test_export_of_what_a_family_cannot_state_is_refused():
    cfg = dataclasses.replace(read("SmolLM2-135M-Instruct"), qk_norm=True)
    with pytest.raises(ValueError, match="qk_norm"):
        families.to_hf(cfg)
