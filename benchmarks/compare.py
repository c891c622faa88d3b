"""rljax beside its peers on the same work, in turns; prints one JSON line of medians and ratios.

    python benchmarks/compare.py --size small --rounds 2 \\
      --peer 'tunix=tunix-env/bin/python tunix_grpo.py --preset small' \\
      --peer 'trl=trl-env/bin/python trl_grpo.py --preset A --mlp 768 --tie 1 --beta 0.04'

A peer is a command that prints one JSON line with the figures named in FIGURES (of Tunix, TRL or
grpo_step.py); each round runs every command once, one after the other. Ratios are the best peer's
figure over ours for seconds, ours over the best peer's for tokens a second: above 1 we are ahead.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

# figure: paths into a tool's JSON, the first that exists counts
FIGURES = {
    "iteration_s": ("iter_s", "iter.median_s", "step_s"),
    "generation_tok_s": ("gen.tok_s", "gen_tok_s"),
    "score_s": ("score.median_s", "ref_score_s", "score_s"),
    "train_s": ("train.median_s", "train_s"),
    "batch1_tok_s": ("sampler.1.tok_s", "gen_alone.1.tok_s"),
    "batch8_tok_s": ("sampler.8.tok_s", "gen_alone.8.tok_s"),
    "batch32_tok_s": ("sampler.32.tok_s", "gen_alone.32.tok_s"),
    "peak_gb": ("peak_gb",),
}


def find(data: Any, path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def figures(data: dict[str, Any]) -> dict[str, float]:
    """Our names for what a tool printed; TRL states the parts of a training step one by one."""
    if "fwd_s" in data:
        data = {**data, "train_s": sum(data[k] for k in ("fwd_s", "bwd_s", "opt_s"))}
    for name in ("peak_rss_mb", "peak_rss_mib"):
        if name in data:
            data = {**data, "peak_gb": data[name] / 1024}
    found = {}
    for name, paths in FIGURES.items():
        values = [float(v) for p in paths if (v := find(data, p)) is not None]
        if values:
            found[name] = values[0]
    return found


def once(command: str) -> dict[str, float]:
    """Runs a command and reads the last line of JSON it prints."""
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"no figures from: {command} (exit status {done.returncode})")
    print(lines[-1], file=sys.stderr, flush=True)
    return figures(json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="small")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iters", type=int, default=3)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--products", default="float32")
    parser.add_argument("--peer", action="append", default=[], help="name=command")
    args = parser.parse_args()
    ours = Path(__file__).with_name("grpo_step.py")
    commands = dict(peer.split("=", 1) for peer in args.peer)
    commands["rljax"] = (
        f"{sys.executable} {ours} --size {args.size} --iters {args.iters} "
        f"--batches {args.batches!r} --products {args.products}"
    )
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, command in commands.items():
            seen[name].append(once(command))
    medians = {
        name: {f: statistics.median(r[f] for r in rows) for f in rows[0]}
        for name, rows in seen.items()
    }
    ratios = {}
    for f, mine in medians["rljax"].items():
        others = [m[f] for name, m in medians.items() if name != "rljax" and f in m]
        if others:
            ratios[f] = mine / max(others) if f.endswith("tok_s") else min(others) / mine
    print(json.dumps({"size": args.size, "rounds": args.rounds, **medians, "ratio": ratios}))


if __name__ == "__main__":
    main()
