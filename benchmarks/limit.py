"""What this machine can do at most: matmul rate at the shapes used, reading and copying memory.

    python benchmarks/limit.py                 one JSON line for both sizes
    python benchmarks/limit.py --size small --dtype bfloat16

Other benchmarks import it (`import limit`) and print its figures beside their own, because a limit
counts only when it was measured in the same minutes on the same machine. All through jax, jitted,
medians. A shape's rate times its flops says how long the work must take; see `seconds`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 7
SHORTEST_S = 0.02  # a timing lasts at least this long, so that the clock and the call cost nothing


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder's sizes, as in the peers' scripts; the head is tied."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocab: int


SIZES = {
    "small": Size(256, 8, 4, 2, 64, 768, 4_096),
    "135m": Size(576, 30, 9, 3, 64, 1_536, 49_152),
}


@dataclasses.dataclass(frozen=True)
class Product:
    """[m, k] @ [k, n], done `count` times with other weights each."""

    m: int
    k: int
    n: int
    count: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n * self.count


def layer_products(size: Size, rows: int) -> dict[str, Product]:
    """The products of all layers' weights with `rows` tokens; qkv and gate with up are fused."""
    heads = size.heads * size.head_size
    qkv = heads + 2 * size.kv_heads * size.head_size
    return {
        "qkv": Product(rows, size.width, qkv, size.layers),
        "o": Product(rows, heads, size.width, size.layers),
        "gate_up": Product(rows, size.width, 2 * size.mlp, size.layers),
        "down": Product(rows, size.mlp, size.width, size.layers),
    }


def head_product(size: Size, rows: int) -> Product:
    """The product of the head with `rows` tokens."""
    return Product(rows, size.width, size.vocab)


def weights(size: Size) -> int:
    """Number of weights that a decode step reads, head included."""
    products = [*layer_products(size, 1).values(), head_product(size, 1)]
    return sum(p.k * p.n * p.count for p in products)


def _median_s(call: Callable[[], Any]) -> float:
    """Median seconds of a call, compiled before and waited for."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, round(SHORTEST_S / max(time.perf_counter() - begin, 1e-6)))
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found)


def matmul_gflops(m: int, k: int, n: int, dtype: str = "float32", count: int = 1) -> float:
    """GFLOP/s of [m, k] @ [k, n] with float32 results, over `count` distinct weights in a row.

    With as many weights as the model has layers, a product of few rows reads them from where the
    model's own are: from memory where they do not fit the cache. Each product waits for the last,
    as layers do. bfloat16 means bfloat16 operands; the cast of the rows is part of the work.
    """
    keys = jax.random.split(jax.random.key(0), count + 1)
    x = jax.random.normal(keys[0], (m, k))
    ws = [jax.random.normal(key, (k, n)).astype(dtype) for key in keys[1:]]

    @jax.jit
    def run(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        y = jnp.zeros((m, n))
        for w in ws:
            operand = (x + 1e-30 * y[:, :1]).astype(dtype)  # waits for the product before
            y = jax.lax.dot(operand, w, preferred_element_type=jnp.float32)
        return y

    return Product(m, k, n, count).flops / _median_s(lambda: run(x, ws)) / 1e9


def read_gbps(megabytes: int = 256) -> float:
    """GB/s of reading an array once: the better of a sum and a matrix-vector product."""
    rows = megabytes * 2**20 // (4 * 4096)
    x, v = jnp.ones((rows, 4096)), jnp.ones((4096,))
    total, product = jax.jit(jnp.sum), jax.jit(jnp.dot)
    seconds = min(_median_s(lambda: total(x)), _median_s(lambda: product(x, v)))
    return x.nbytes / seconds / 1e9


def copy_gbps(megabytes: int = 256) -> float:
    """GB/s of reading an array and writing it in place (both counted).

    The buffer is donated: a fresh one costs page faults, which are not the memory's limit.
    """
    x = jnp.ones((megabytes * 2**18,))
    step = jax.jit(lambda x: x + 1.0, donate_argnums=0)

    def call() -> jax.Array:
        nonlocal x
        x = step(x)
        return x

    return 2 * x.nbytes / _median_s(call) / 1e9


def seconds(products: list[Product], dtype: str = "float32") -> float:
    """Seconds that the products take at their measured rates: what no program here can beat."""
    return sum(p.flops / matmul_gflops(p.m, p.k, p.n, dtype, p.count) / 1e9 for p in products)


def machine() -> dict[str, Any]:
    """Processor, instruction sets that matter here, cores, memory and jax version."""
    found: dict[str, Any] = {"cpu": "unknown", "flags": []}
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text()
        name = re.search(r"model name\s*:\s*(.+)", text)
        flags = re.search(r"flags\s*:\s*(.+)", text)
        found["cpu"] = name.group(1).strip() if name else "unknown"
        listed = flags.group(1).split() if flags else []
        found["flags"] = sorted(f for f in listed if re.search(r"^amx|avx512f|bf16|avx2$", f))
    affinity = getattr(os, "sched_getaffinity", None)
    found["cores"] = len(affinity(0)) if affinity else os.cpu_count()
    found["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    found["backend"] = f"{jax.devices()[0].device_kind} x {jax.device_count()}"
    return found | {"jax": jax.__version__}


def limits(name: str, dtype: str = "float32", micro_rows: int = 768) -> dict[str, Any]:
    """Rates, in GFLOP/s, of one size's products as they occur, and what its weights weigh.

    Args:
      micro_rows: tokens of a micro-batch in training and scoring; 768 = 4 sequences of 192.
    """
    size = SIZES[name]
    out: dict[str, Any] = {"weights": weights(size)}
    for place, rows in (("train", micro_rows), ("decode32", 32), ("decode1", 1)):
        products = layer_products(size, rows) | {"head": head_product(size, rows)}
        rates = {
            part: round(matmul_gflops(p.m, p.k, p.n, dtype, p.count), 1)
            for part, p in products.items()
        }
        total = sum(p.flops for p in products.values())
        time_s = sum(p.flops / rates[part] / 1e9 for part, p in products.items())
        out[place] = {"rows": rows, **rates, "all": round(total / time_s / 1e9, 1)}
        if rows <= 32:
            out[place]["ms"] = round(1e3 * time_s, 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    names = list(SIZES) if args.size == "both" else [args.size]
    line = {
        "benchmark": "limit",
        "dtype": args.dtype,
        "machine": machine(),
        "read_gbps": round(read_gbps(), 1),
        "copy_gbps": round(copy_gbps(), 1),
        "matmul_2048_gflops": round(matmul_gflops(2048, 2048, 2048, args.dtype), 1),
        "gflops": {name: limits(name, args.dtype) for name in names},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
