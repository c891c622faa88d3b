"""The machine's limits: what is counted as work, not how fast this machine is."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def limit():
    spec = importlib.util.spec_from_file_location("limit", ROOT / "benchmarks" / "limit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["limit"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["limit"]


def test_the_weights_of_135m_are_those_of_the_real_model(limit):
    # SmolLM2-135M: 134,515,008 parameters, of which 61 norms of 576 enter no product.
    assert limit.weights(limit.SIZES["135m"]) == 134_515_008 - 61 * 576


def test_a_token_costs_two_flops_a_weight(limit):
    size = limit.SIZES["small"]
    products = [*limit.layer_products(size, 5).values(), limit.head_product(size, 5)]
    assert sum(p.flops for p in products) == 2 * 5 * limit.weights(size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rates_are_positive(limit, monkeypatch, dtype):
    monkeypatch.setattr(limit, "SHORTEST_S", 1e-4)
    assert limit.matmul_gflops(3, 5, 7, dtype, count=2) > 0
    assert limit.read_gbps(1) > 0 and limit.copy_gbps(1) > 0


def test_a_timing_is_the_time_of_one_call(limit, monkeypatch):
    monkeypatch.setattr(limit, "SHORTEST_S", 0.03)  # several calls a timing
    assert 0.01 <= limit._median_s(lambda: time.sleep(0.01)) < 0.02


def test_the_machine_is_named(limit):
    found = limit.machine()
    assert found["cores"] >= 1 and "jax" in found and isinstance(found["cpu"], str)
