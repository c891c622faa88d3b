"""Moves a parameter tree between two layouts over the same devices by one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rljax import trees
from rljax.sharding import rules


def make_reshard(spec: Any, target: rules.Layout, dtype: Any = None) -> Callable[[Any], Any]:
    """Returns params -> params in `target`'s layout, cast to `dtype` (None keeps each leaf's own).

    The program is an identity with output shardings, so source and target meshes must hold the
    same devices in the same order (jit refuses otherwise); values are bit-equal but for the cast.

    Args:
      spec: the tree of parameter descriptions (`models.spec.specs`).
    """

    def move(params: Any) -> Any:
        return params if dtype is None else trees.cast(params, dtype)

    return jax.jit(move, out_shardings=target.tree(spec))
