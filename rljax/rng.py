"""One key per named purpose and step: a new consumer leaves the others' streams unchanged."""

from __future__ import annotations

import zlib

import jax


def fold(key: jax.Array, purpose: str, *indices: int | jax.Array) -> jax.Array:
    """Derives the key of a purpose ("sample", "shuffle") and any number of indices (step, row).

    The purpose enters by its CRC-32, which is the same in every process and Python version.
    """
    key = jax.random.fold_in(key, zlib.crc32(purpose.encode()))
    for index in indices:
        key = jax.random.fold_in(key, index)
    return key
