"""What a run was: its resolved configuration, the file it came from, versions and machine."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from rljax import metrics

CONFIG, SOURCE, VERSIONS = "config.json", "config.py", "versions.jsonl"


def save_config(config: Any, workdir: str | Path, source_text: str = "") -> None:
    """Writes config.json (resolved values), config.py (the file's text) and versions.jsonl."""
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / CONFIG).write_text(
        json.dumps(metrics.to_json(config), indent=2, ensure_ascii=False) + "\n"
    )
    if source_text:
        (workdir / SOURCE).write_text(source_text)
    write_versions(workdir)


def write_versions(workdir: str | Path) -> dict[str, Any]:
    """Appends to versions.jsonl when, how and on what this process started, and returns the row."""
    row = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": git_commit(),
        "packages": package_versions(),
        "machine": machine(),
    }
    metrics.append_rows(Path(workdir) / VERSIONS, [row])
    return row


def git_commit() -> str | None:
    """Commit of the repository that rljax runs from, "-dirty" where files differ, or None."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # installed from an index, or a folder inside another project
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty"]
    command += ["--exclude=*"]  # no tag names: the commit itself
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()
    return None


def package_versions() -> dict[str, str]:
    """Installed versions of rljax and of what it computes with."""
    names = ("rljax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")
    names += ("tokenizers", "safetensors", "jinja2")
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine() -> str:
    """One line: devices, processor, cores, operating system."""
    kinds = [d.device_kind for d in jax.devices()]
    devices = ", ".join(f"{kinds.count(k)} x {k}" for k in sorted(set(kinds)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{devices}; {processor()}, {cores} cores; {platform.platform(terse=True)}"


def processor() -> str:
    """Name of the processor, from /proc/cpuinfo where there is one."""
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()
