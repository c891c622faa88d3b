"""Fixtures shared by the suite: the folder of real data and models, and a small device count."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices for shardings; little optimisation, because compiling is most of the suite's time.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ.setdefault("XLA_FLAGS", FLAGS)
# Programs that tests, and the processes they start, have in common are compiled once a session.
CACHE = tempfile.TemporaryDirectory(prefix="rljax-programs-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", CACHE.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Returns `path` inside the folder of real data, or skips the test where it is absent."""
    base = Path(os.environ.get("RLJAX_SHARED", ROOT.parent / "shared"))

    def find(path: str) -> Path:
        if not (base / path).exists():
            pytest.skip(f"{path} is not on this machine; point RLJAX_SHARED at the data folder")
        return base / path

    return find
