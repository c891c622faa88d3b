"""Time of the move from the training to the decode layout beside a copy of the bytes it must move.

    python benchmarks/reshard.py --size 135m --fsdp 4 --tensor 2 --decode-tensor 4

Eight devices made of this machine's cores, random float32 weights; prints one JSON line. "least"
is what a device must receive (`sharding.reshard.least_bytes`); "copy" the time to copy, between two
arrays of this process, as many bytes as the result takes on all devices together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

DEVICES = 8
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import limit  # noqa: E402
import numpy as np  # noqa: E402

from rljax import trees  # noqa: E402
from rljax.models import spec  # noqa: E402
from rljax.sharding import mesh, reshard, rules  # noqa: E402


def median_s(call: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=[*limit.SIZES], default="135m")
    parser.add_argument("--fsdp", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--decode-tensor", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    size = limit.SIZES[args.size]
    # Heads are padded to a multiple of the shards, so that every size divides.
    heads = -(-size.heads // DEVICES) * DEVICES
    specs = spec.specs(
        spec.ModelConfig(
            "llama",
            size.vocab,
            size.vocab,
            size.width,
            size.layers,
            heads,
            DEVICES,
            size.head_size,
            size.mlp,
        )
    )
    made = mesh.make_mesh(mesh.MeshConfig(-1, args.fsdp, args.tensor))
    source = rules.Layout.of(made, rules.TRAIN_RULES)
    target = rules.decode_layout(mesh.MeshConfig(-1, 1, args.decode_tensor), made)
    move = reshard.make_reshard(specs, source, target)
    params = jax.device_put(spec.init(specs, key=jax.random.key(0)), source.tree(specs))
    jax.block_until_ready(move(params))
    found = move.report()
    # Every shard of the result is written, on each device that holds a copy of it.
    written = trees.count(params) * DEVICES // target.size("heads")
    chunk, other = np.ones(written, np.float32), np.zeros(written, np.float32)
    out = {
        "benchmark": "reshard",
        "args": vars(args),
        "received_bytes_per_device": found.received_bytes,
        "least_bytes_per_device": found.least_bytes,
        "temporary_bytes_per_device": found.temporary_bytes,
        "collectives": found.collectives,
        "bytes_written": int(chunk.nbytes),
        "move_s": median_s(lambda: move(params), args.repeats),
        "copy_s": median_s(lambda: np.copyto(other, chunk), args.repeats),
        "machine": limit.machine(),
    }
    print(json.dumps(out | {"ratio": out["move_s"] / out["copy_s"]}))


if __name__ == "__main__":
    main()
