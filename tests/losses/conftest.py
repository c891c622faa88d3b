"""These tests run many tiny programs once each: compile time is all that counts."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
