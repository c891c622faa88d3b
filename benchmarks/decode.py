"""Tokens a second of the decode engine, next to what this machine allows; prints one JSON line.

    python benchmarks/decode.py                                both sizes, batch 1, 8, 32, 128
    python benchmarks/decode.py --size 135m --batch 1 32
    python benchmarks/decode.py --size small --products bfloat16 --group 1

Prompts of 64 tokens, 128 new ones each (none ends early), groups of up to 8 samples a prompt as in
the peers' runs, random weights. "tokens_per_s" is the whole call, prefill included; "step_ms" one
token of all rows, from the difference between calls of 128 tokens and of 1. The limit of a step is
the time of its products at their measured rates plus that of reading the keys and values it needs;
at batch 1 it is that of reading the weights (benchmarks/limit.py, same run, same dtype).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import jax
import limit
import numpy as np

from rljax.decode import batching, engine
from rljax.models import layers, spec
from rljax.sharding import rules

PROMPT_TOKENS, NEW_TOKENS = 64, 128


def step_limit_s(size: limit.Size, rows: int, group: int, dtype: str, read_gbps: float) -> float:
    """Seconds that no step of `rows` sequences can beat with the same work."""
    if rows == 1:
        return limit.weights(size) * np.dtype(dtype).itemsize / read_gbps / 1e9
    products = [*limit.layer_products(size, rows).values(), limit.head_product(size, rows)]
    # A prompt is read once a group, a completion as far as it goes: half of it in the mean.
    positions = rows // group * PROMPT_TOKENS + rows * (NEW_TOKENS + 1) / 2
    cache_bytes = 2 * size.layers * size.kv_heads * size.head_size * positions * 4
    return limit.seconds(products, dtype) + cache_bytes / read_gbps / 1e9


class Case:
    """An engine for one batch size, and its requests."""

    def __init__(self, size: limit.Size, rows: int, group: int, products: Any) -> None:
        cfg = spec.ModelConfig(
            "llama", size.vocab, size.vocab, size.width, size.layers, size.heads, size.kv_heads,
            size.head_size, size.mlp,
        )  # fmt: skip
        self.rows, self.group = rows, min(group, rows)
        sizes = engine.EngineConfig(
            slots=rows, cache_length=PROMPT_TOKENS + NEW_TOKENS, prompt_buckets=(PROMPT_TOKENS,),
            steps_per_call=NEW_TOKENS, share=self.group,
        )  # fmt: skip
        precision = layers.Precision(products=products)
        self.engine = engine.make_engine(cfg, sizes, rules.single(), precision)
        specs = spec.specs(cfg)
        params = jax.jit(lambda key: spec.init(specs, key=key))(jax.random.key(0))
        self.tree = self.engine.prepare(params)
        rng = np.random.default_rng(rows)
        self.prompts = rng.integers(0, size.vocab, (rows // self.group, PROMPT_TOKENS)).tolist()
        self.calls = 0

    def seconds(self, new_tokens: int) -> float:
        """Time of one call that completes every prompt."""
        self.calls += 1
        requests = [
            batching.Request(p, seed=self.calls, samples=self.group, max_tokens=new_tokens)
            for p in self.prompts
        ]
        begin = time.perf_counter()
        out = batching.generate_all(self.engine, self.tree, requests)
        took = time.perf_counter() - begin
        assert sum(len(c.ids) for c in out) == self.rows * new_tokens
        return took


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Medians of a case, compiled before."""
    case.seconds(NEW_TOKENS)
    traces = dict(case.engine.traces)
    pairs = [(case.seconds(NEW_TOKENS), case.seconds(1)) for _ in range(repeats)]
    assert traces == dict(case.engine.traces), "compiled during the measurement"
    whole = statistics.median(a for a, _ in pairs)
    step = statistics.median(a - b for a, b in pairs) / (NEW_TOKENS - 1)
    return {
        "tokens_per_s": round(case.rows * NEW_TOKENS / whole, 1),
        "prefill_s": round(statistics.median(b for _, b in pairs), 3),
        "step_ms": round(1e3 * step, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=[*limit.SIZES, "both"], default="both")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--products", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    out: dict[str, Any] = {}
    for name in list(limit.SIZES) if args.size == "both" else [args.size]:
        size, out[name] = limit.SIZES[name], {}
        for rows in args.batch:
            case = Case(size, rows, args.group, args.products)
            found: dict[str, Any] = measure(case, args.repeats)
            read = limit.read_gbps()
            least = step_limit_s(size, rows, case.group, args.products, read)
            found |= {
                "limit_step_ms": round(1e3 * least, 3),
                "limit_tokens_per_s": round(rows / least, 1),
                "of_limit": round(1e3 * least / found["step_ms"], 3),
                "read_gbps": round(read, 1),
            }
            out[name][str(rows)] = found
    line = {
        "benchmark": "decode",
        "products": args.products,
        "group": args.group,
        "machine": limit.machine(),
        "load": round(os.getloadavg()[0], 1),
        **out,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
