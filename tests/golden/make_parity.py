"""Makes tests/golden/parity/<family>.npz: logits of tiny random models computed by transformers.

Needs torch and transformers (made with 2.13.0 and 5.24.0; eager attention, float32):

    python tests/golden/make_parity.py

A file holds one set of random weights in Hugging Face names (rounded to float16, so that storing
them is exact) and, for each variant of the configuration, config.json as given (transformers 4
fields), as transformers 5 rewrites it, and the logits. Norms and biases are far from the identity,
sizes are distinct, sequences are longer than the windows, and every field that enters the
computation appears with two values.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

B, S = 2, 23
SIZES = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA2 = {"sliding_window": 5, "query_pre_attn_scalar": 16}
FAMILIES: dict[str, dict[str, dict]] = {
    "llama": {
        "untied": {"tie_word_embeddings": False},
        "tied": {"tie_word_embeddings": True},
        "theta": {"tie_word_embeddings": True, "rope_theta": 50.0, "rms_norm_eps": 0.1},
        "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        "llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}},
        "llama3_other": {
            "rope_scaling": {
                **LLAMA3,
                "original_max_position_embeddings": 48,
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
                "factor": 2.0,
            }
        },
        "yarn": {"rope_scaling": YARN},
        "yarn_attention": {"rope_scaling": {**YARN, "attention_factor": 0.5, "beta_fast": 2.0}},
        "yarn_mscale": {
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 2.0, "beta_slow": 0.2}
        },
    },
    "mistral": {
        "window": {"sliding_window": 4},
        "global": {"sliding_window": None, "rope_theta": 300.0},
    },
    "qwen2": {
        "global": {"use_sliding_window": False},
        "window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        "yarn": {"rope_scaling": YARN, "rope_theta": 1e6, "tie_word_embeddings": True},
    },
    "qwen3": {
        "global": {"use_sliding_window": False},
        "window": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
        "tied": {"tie_word_embeddings": True, "rope_theta": 100.0, "rms_norm_eps": 0.1},
    },
    "gemma": {
        "tied": {},
        "other": {"rope_theta": 77.0, "rms_norm_eps": 0.1, "hidden_act": "gelu"},
    },
    "gemma2": {
        "capped": {**GEMMA2, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        "uncapped": {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        "other": {"sliding_window": 9, "query_pre_attn_scalar": 40, "rope_theta": 77.0},
    },
    "gemma3_text": {
        "window": {"sliding_window": 4, "sliding_window_pattern": 2, "rope_theta": 1e6},
        "scaled": {
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "rope_local_base_freq": 40.0,
            "query_pre_attn_scalar": 30,
            "final_logit_softcapping": 3.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
}


def weights(model: torch.nn.Module, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Random values for every parameter, rounded to float16: {name: array}."""
    out = {}
    gemma = model.config.model_type.startswith("gemma")
    for name, p in model.named_parameters():
        x = generator.standard_normal(tuple(p.shape))
        if name.endswith("norm.weight"):
            x = 0.4 * x + (0.0 if gemma else 1.0)
        elif name.endswith("bias"):
            x = 0.7 * x
        elif p.ndim == 2 and "embed" not in name:
            x = 1.4 * x / np.sqrt(p.shape[1])
        out[name] = x.astype(np.float16)
    return out


def main() -> None:
    folder = Path(__file__).parent / "parity"
    folder.mkdir(exist_ok=True)
    for seed, (family, variants) in enumerate(FAMILIES.items()):
        generator = np.random.default_rng(seed)
        ids = generator.integers(0, SIZES["vocab_size"], (B, S))
        tensors: dict[str, np.ndarray] = {}
        out: dict[str, np.ndarray] = {"ids": ids.astype(np.int32)}
        configs = {}
        for variant, changes in variants.items():
            given = json.loads(json.dumps({**SIZES, **changes}))  # transformers edits it in place
            config = transformers.AutoConfig.for_model(family, **given)
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            ).eval()
            for name, x in weights(model, generator).items():
                tensors.setdefault(name, x)
            state = {
                n: torch.tensor(tensors[n].astype(np.float32)) for n, _ in model.named_parameters()
            }
            missing, unexpected = model.load_state_dict(state, strict=False)
            assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
            model.tie_weights()
            with torch.no_grad():
                logits = model(torch.tensor(ids)).logits
            out[f"logits/{variant}"] = logits.numpy().astype(np.float32)
            rewritten = json.loads(config.to_json_string(use_diff=False))
            configs[variant] = {"4": {"model_type": family, **SIZES, **changes}, "5": rewritten}
        out["configs"] = np.array(json.dumps(configs))
        out |= {f"tensor/{name}": x for name, x in tensors.items()}
        np.savez_compressed(folder / f"{family}.npz", allow_pickle=False, **out)
        print(family, (folder / f"{family}.npz").stat().st_size)


if __name__ == "__main__":
    main()
