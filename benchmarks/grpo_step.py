"""A GRPO iteration at the shape the peers' scripts use, phase by phase; prints one JSON line.

    python benchmarks/grpo_step.py --size small
    python benchmarks/grpo_step.py --size 135m --iters 3
    python benchmarks/grpo_step.py --size small --products bfloat16

4 prompts x 8 completions, 64 prompt and 128 new tokens (none ends early), KL to a reference, AdamW,
a trivial reward; random weights. It is the recipe itself (`recipes.grpo.Run`) that is timed:
sampling, reward, scoring by the reference, gradient, update, resharding. Two iterations warm up.
"sampler" is the decode engine alone at several batch sizes, "limits" what the machine can do
(benchmarks/limit.py) for the work as it is done: the head at response positions, the prompt of a
group once.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from typing import Any

import limit
import numpy as np

from rljax import envs, trees
from rljax import policy as policies
from rljax.decode import batching
from rljax.losses import algorithms
from rljax.models import layers, spec
from rljax.recipes import grpo
from rljax.train.optimiser import OptimiserConfig

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 64, 128


class Numbers:
    """A tokenizer whose text is a list of decimal ids, with no token that ends a completion."""

    template, stop_ids, eos_id = None, (), None

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def make_policy(size: limit.Size, products: Any) -> policies.Policy:
    cfg = spec.ModelConfig(
        "llama", size.vocab, size.vocab, size.width, size.layers, size.heads, size.kv_heads,
        size.head_size, size.mlp, rope_theta=500_000.0,
    )  # fmt: skip
    tokenizer: Any = Numbers()
    precision = layers.Precision(products=products)
    return policies.scratch(cfg, tokenizer, seed=0, precision=precision)


def make_task(size: limit.Size, count: int) -> envs.Task:
    rng = np.random.default_rng(0)
    rows = rng.integers(4, size.vocab, (count, PROMPT_TOKENS))
    prompts = [" ".join(map(str, row)) for row in rows]
    return envs.custom(prompts, reward=trivial, max_tokens=NEW_TOKENS)


def trivial(texts: Any, examples: Any) -> list[float]:
    del examples
    return [sum(map(int, text.split()[:8])) % 97 / 97 for text in texts]


def timed_sampler(policy: policies.Policy, batch: int, repeats: int) -> dict[str, float]:
    """Tokens a second of `batch` different prompts decoded side by side, prefill included."""
    rng = np.random.default_rng(batch)
    alone = policies.Policy(
        policy.cfg,
        policy.params,
        policy.tokenizer,
        layout=policy.layout,
        precision=policy.precision,
    )

    def call(seed: int) -> float:
        requests = [
            batching.Request(row.tolist(), seed=seed + i, max_tokens=NEW_TOKENS)
            for i, row in enumerate(rng.integers(4, policy.cfg.vocab_size, (batch, PROMPT_TOKENS)))
        ]
        begin = time.perf_counter()
        out = alone.run(requests)
        seconds = time.perf_counter() - begin
        assert all(len(c.ids) == NEW_TOKENS for group in out for c in group)
        return seconds

    first = call(0)
    seconds = statistics.median(call(1000 * (i + 1)) for i in range(repeats))
    return {"tok_s": batch * NEW_TOKENS / seconds, "median_s": seconds, "first_s": first}


def attention_flops(size: limit.Size) -> int:
    """Flops of one row's attention, scores and values, counting only the keys a token may see."""
    prompt = PROMPT_TOKENS * (PROMPT_TOKENS + 1) // 2
    response = NEW_TOKENS * PROMPT_TOKENS + NEW_TOKENS * (NEW_TOKENS + 1) // 2
    return 4 * size.layers * size.heads * size.head_size * (prompt + GROUP * response)


def limits(size: limit.Size, dtype: str) -> dict[str, float]:
    """Seconds that the flops of scoring and of training take at the measured rates.

    A row is a prompt and its group: layers at every token, the head at response tokens. Attention
    is taken to run at the rate of the layers' products.
    """
    products = [*limit.layer_products(size, PROMPT_TOKENS + GROUP * NEW_TOKENS).values()]
    layers_s = limit.seconds(products, dtype)
    attention_s = layers_s * attention_flops(size) / sum(p.flops for p in products)
    body = PROMPTS * (layers_s + attention_s)
    head = PROMPTS * limit.seconds([limit.head_product(size, GROUP * NEW_TOKENS)], dtype)
    # Training: forward and twice that backward; the blockwise head computes its logits once more.
    return {"score_s": body + head, "train_s": 3 * body + 4 * head, "read_gbps": limit.read_gbps()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=[*limit.SIZES], default="small")
    parser.add_argument("--iters", type=int, default=5, help="timed iterations after two")
    parser.add_argument("--products", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--micro", type=int, default=4, help="microbatches, of whole prompts")
    parser.add_argument("--batches", default="1,8,32", help="sampler batch sizes, '' for none")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    size = limit.SIZES[args.size]
    policy = make_policy(size, args.products)
    run = grpo.start(
        policy, make_task(size, 64), group=GROUP, prompts=PROMPTS, loss=algorithms.grpo(kl=0.04),
        optimiser=OptimiserConfig(lr=1e-6), microbatches=args.micro, seed=0, eval_samples=GROUP,
        precision=policy.precision,
    )  # fmt: skip
    rows = [step.metrics for step in run.steps(2 + args.iters)]
    timed = rows[2:]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in timed)

    new, total = PROMPTS * GROUP * NEW_TOKENS, PROMPTS * GROUP * (PROMPT_TOKENS + NEW_TOKENS)
    seconds = {k: median(f"time/{k}_s") for k in ("step", "sample", "score", "train")}
    out = {
        "tool": "rljax",
        "args": vars(args),
        "params": trees.count(policy.params),
        "iter_s": seconds["step"],
        "gen": {"median_s": seconds["sample"], "tok_s": new / seconds["sample"]},
        "score": {"median_s": seconds["score"], "tok_s": total / seconds["score"]},
        "train": {"median_s": seconds["train"], "tok_s": total / seconds["train"]},
        "mismatch_mean_abs_logp": median("mismatch/mean_abs_logp"),
        "first_iter_s": rows[0]["time/step_s"],
        "compiles_after_first": timed[-1]["compile/programs"] - rows[0]["compile/programs"],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    batches = [int(b) for b in args.batches.split(",") if b]
    out["sampler"] = {b: timed_sampler(policy, b, args.repeats) for b in batches}
    out["limits"] = limits(size, args.products)
    out["machine"] = limit.machine()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
