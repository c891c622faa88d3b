"""Names of leaves, and what is done by name or over all leaves: count, cast, norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def flatten(tree: Tree, separator: str = "/") -> dict[str, Any]:
    """Returns {name: leaf} with path components joined by `separator`, in tree order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator=separator): x for path, x in leaves}


def unflatten(leaves: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Builds the nested dict whose `flatten` gives `leaves`."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split(separator)
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def count(tree: Tree) -> int:
    """Number of elements over all leaves (arrays or shape structs)."""
    return sum(int(x.size) for x in jax.tree.leaves(tree))


def size_bytes(tree: Tree) -> int:
    """Bytes over all leaves (arrays or shape structs)."""
    return sum(int(x.size) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def cast(tree: Tree, dtype: Any) -> Tree:
    """Casts the floating-point leaves to `dtype`; integer leaves and keys pass through."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def global_norm(tree: Tree) -> jax.Array:
    """Euclidean norm over all leaves, summed in float32."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0.0)))
