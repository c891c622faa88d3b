"""The rules table: which mesh axis each logical axis is split over, in training and in decoding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.sharding import mesh as meshes

Rules = Mapping[str, tuple[str, ...]]

TRAIN_RULES: Rules = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "layers": (),
}
"""Weights are split over fsdp and tensor; sequences over data and fsdp."""

_WEIGHTS = ("tensor", "extra")
DECODE_RULES: Rules = {
    "batch": ("data", "micro"),
    "embed": (),
    "heads": _WEIGHTS,
    "kv_heads": _WEIGHTS,
    "mlp": _WEIGHTS,
    "vocab": _WEIGHTS,
    "layers": (),
}
"""Weights are split over tensor and extra (`mesh.make_decode_mesh`): a decode step gathers none."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arrays live: a mesh and the rules table; hashable."""

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, mesh: Mesh, rules: Rules) -> Layout:
        unknown = {a for axes in rules.values() for a in axes} - set(mesh.axis_names)
        if unknown:
            raise ValueError(f"rules name {sorted(unknown)}; the mesh has {mesh.axis_names}")
        return cls(mesh, tuple(sorted((k, tuple(v)) for k, v in rules.items())))

    def size(self, axis: str) -> int:
        """Number of shards that a logical axis is cut into."""
        return math.prod(self.mesh.shape[a] for a in dict(self.rules)[axis])

    def sharding(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...] = (), name: str = "array"
    ) -> NamedSharding:
        """Sharding of an array with these logical axes (None = replicated dimension).

        Raises:
          ValueError: if a logical axis is unknown, two of them share a mesh axis, or a dimension of
            `shape` does not divide.
        """
        rules, used, parts = dict(self.rules), {}, []
        for i, axis in enumerate(axes):
            if axis is not None and axis not in rules:
                raise ValueError(f"{name}: unknown logical axis {axis!r}; known: {sorted(rules)}")
            mesh_axes = rules[axis] if axis is not None else ()
            for a in mesh_axes:
                if a in used and self.mesh.shape[a] > 1:
                    raise ValueError(
                        f"{name}: logical axes {used[a]!r} and {axis!r} both map to mesh axis {a!r}"
                    )
                used[a] = axis
            n = math.prod(self.mesh.shape[a] for a in mesh_axes)
            if shape and shape[i] % n:
                fits = [d for d in range(1, n + 1) if shape[i] % d == 0 and n % d == 0]
                raise ValueError(
                    f"{name}: dimension {i} ({axis}, size {shape[i]}) does not divide over {n} "
                    f"devices of {mesh_axes}; sizes that work: {fits}, or map {axis!r} to () "
                    "in the rules"
                )
            parts.append(mesh_axes if len(mesh_axes) > 1 else (mesh_axes[0] if mesh_axes else None))
        return NamedSharding(self.mesh, PartitionSpec(*parts))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrains a traced array to this layout; on one device returns it as it is."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def tree(self, spec: Any) -> Any:
        """Shardings of a tree of descriptions that have `.shape` and `.axes` (models/spec.py)."""

        def one(path: tuple, p: Any) -> NamedSharding:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return self.sharding(p.axes, p.shape, name)

        return jax.tree_util.tree_map_with_path(one, spec, is_leaf=lambda p: hasattr(p, "axes"))

    @property
    def replicated(self) -> NamedSharding:
        """Sharding that keeps a whole copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def decode_layout(cfg: meshes.MeshConfig, train: Mesh) -> Layout:
    """The layout of decoding over the training mesh's devices (see `mesh.make_decode_mesh`)."""
    return Layout.of(meshes.make_decode_mesh(cfg, train), DECODE_RULES)


def single() -> Layout:
    """Layout of one device, the first."""
    mesh = meshes.make_mesh(meshes.MeshConfig(1, 1, 1), jax.devices()[:1])
    return Layout.of(mesh, TRAIN_RULES)
