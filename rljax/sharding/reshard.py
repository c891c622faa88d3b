"""Moves a parameter tree between two layouts over the same devices by compiled programs.

Where a mesh axis moves from one array dimension to another (fsdp on rows to tensor on columns), an
identity with output shardings makes XLA gather the whole weight. So each leaf's way is planned
here, on one mesh that refines both layouts: first slices (axes that appear), then all-to-alls (axes
that change dimension), then all-gathers (axes that go). Each step then works on the smallest
shard, and a device receives only what it does not hold already. The zero-redundancy grouping of
HybridFlow (arXiv 2409.19256, section 5.3) is the case where each held shard is a slice of the
wanted one (`mesh.make_decode_mesh` orders axes so).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rljax.sharding import collectives, rules

GROUP_BYTES = 256 * 2**20
Names = dict[str, tuple[str, ...]]  # axis of a mesh -> axes of the refined mesh, major first


def refine(first: Mesh, second: Mesh) -> tuple[Mesh, Names, Names] | None:
    """A mesh over the same devices in the same order whose axes divide the axes of both.

    None where there is none: 3 x 4 devices against 4 x 3.
    """
    cuts = {1}
    for mesh in (first, second):
        sizes = list(mesh.shape.values())
        cuts |= {math.prod(sizes[i:]) for i in range(len(sizes))}
    strides = sorted(cuts, reverse=True)  # from the number of devices down to 1
    ratios = [(a // b, a % b) for a, b in itertools.pairwise(strides)]
    if any(rest for _, rest in ratios):
        return None
    axes = tuple(f"x{i}" for i in range(len(ratios)))
    shape = [size for size, _ in ratios]
    refined = Mesh(first.devices.reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))

    def names(mesh: Mesh) -> Names:
        out, high = {}, mesh.size
        for axis, size in mesh.shape.items():
            low = high // size
            out[axis] = tuple(a for a, s in zip(axes, strides, strict=False) if low < s <= high)
            high = low
        return out

    return refined, names(first), names(second)


def path(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> list[Any]:
    """The shardings a leaf takes from `source`, `target` last (see the module)."""
    refined = refine(source.mesh, target.mesh)  # pyright: ignore[reportArgumentType]
    if refined is None:
        return [target]
    mesh, from_names, to_names = refined
    held, wanted = _axes(source, from_names, len(shape)), _axes(target, to_names, len(shape))
    before, after = {a for d in held for a in d}, {a for d in wanted for a in d}
    sliced = [h + tuple(a for a in w if a not in before) for h, w in zip(held, wanted, strict=True)]
    turned = [w + tuple(a for a in h if a not in after) for h, w in zip(held, wanted, strict=True)]

    def divides(step: list[tuple[str, ...]]) -> bool:
        counts = [math.prod(mesh.shape[a] for a in axes) for axes in step]
        return all(n % count == 0 for n, count in zip(shape, counts, strict=True))

    steps, last = [], held
    for step in (sliced, turned):
        if step not in (last, wanted) and divides(step):
            steps.append(NamedSharding(mesh, PartitionSpec(*step)))
            last = step
    return [*steps, target]


def _axes(sharding: NamedSharding, names: Names, ndim: int) -> list[tuple[str, ...]]:
    """Refined axes of each array dimension."""
    parts = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    tuples = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in parts]
    return [tuple(r for axis in axes for r in names[axis]) for axes in tuples]


def least_bytes(
    source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], itemsize: int
) -> int:
    """Bytes that the device which lacks most must receive: of its new shard, what it lacks."""
    had, wants = source.devices_indices_map(shape), target.devices_indices_map(shape)

    def span(part: slice, size: int) -> tuple[int, int]:
        return part.start or 0, size if part.stop is None else part.stop

    def lacking(device: Any) -> int:
        all_of, common = 1, 1
        for h, w, size in zip(had[device], wants[device], shape, strict=True):
            (h0, h1), (w0, w1) = span(h, size), span(w, size)
            all_of *= w1 - w0
            common *= max(min(h1, w1) - max(h0, w0), 0)
        return all_of - common

    return itemsize * max(lacking(d) for d in wants)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a reshard does on each device, read from its compiled programs.

    Attributes:
      received_bytes: by collectives. least_bytes: the minimum (`least_bytes`), leaf by leaf.
      temporary_bytes: most that a group of leaves needs beside what it reads and writes.
      largest_group_bytes: bytes that the largest group of leaves writes.
      collectives: number of each kind.
    """

    received_bytes: float
    least_bytes: int
    temporary_bytes: int
    largest_group_bytes: int
    collectives: dict[str, int]


class Reshard:
    """params -> the same values in another layout, cast to a dtype; `make_reshard` builds one."""

    def __init__(
        self, like: Any, source: Any, target: Any, dtype: Any, group_bytes: int, donate: bool
    ) -> None:
        leaves, self._tree = jax.tree.flatten(like)
        self._like = leaves
        self._source, self._target = jax.tree.leaves(source), jax.tree.leaves(target)
        self._dtype = dtype
        self._groups = self._cut(group_bytes)
        self._same_devices = all(
            s._device_assignment == t._device_assignment
            for s, t in zip(self._source, self._target, strict=True)
        )
        self._programs = [self._program(group, donate) for group in self._groups]

    def _cut(self, limit: int) -> list[list[int]]:
        """Leaves in order, in groups that write at most `limit` bytes a device (or one leaf)."""
        groups, room = [], 0
        for i in range(len(self._like)):
            size = self._written(i)
            if not groups or size > room:
                groups.append([])
                room = limit
            groups[-1].append(i)
            room -= size
        return groups

    def _itemsize(self, i: int) -> int:
        return np.dtype(self._dtype or self._like[i].dtype).itemsize

    def _written(self, i: int) -> int:
        return math.prod(self._target[i].shard_shape(self._like[i].shape)) * self._itemsize(i)

    def _program(self, group: list[int], donate: bool) -> Callable[[list[Any]], list[Any]]:
        ways = [path(self._source[i], self._target[i], self._like[i].shape) for i in group]

        def move(leaves: list[Any]) -> list[Any]:
            out = []
            for x, way in zip(leaves, ways, strict=True):
                x = x if self._dtype is None else x.astype(self._dtype)  # before it travels
                for step in way[:-1]:
                    x = jax.lax.with_sharding_constraint(x, step)
                out.append(x)
            return out

        return jax.jit(
            move,
            in_shardings=([self._source[i] for i in group],),
            out_shardings=[self._target[i] for i in group],
            donate_argnums=0 if donate else (),
        )

    def __call__(self, params: Any, before: tuple[Any, Any] | None = None) -> Any:
        """Returns the moved tree.

        Args:
          before: (params, moved) of an earlier call: leaves that are the same arrays as then, such
            as a frozen base, are not moved again.
        """
        leaves = jax.tree.leaves(params)
        old = [(None, None)] * len(leaves)
        if before is not None:
            old = list(zip(*map(jax.tree.leaves, before), strict=True))
        out: list[Any] = [new if x is y else None for x, (y, new) in zip(leaves, old, strict=True)]
        for group, program in zip(self._groups, self._programs, strict=True):
            if all(out[i] is not None for i in group):
                continue
            if self._same_devices:
                moved = program([leaves[i] for i in group])
            else:
                cast = [leaves[i].astype(self._dtype or leaves[i].dtype) for i in group]
                moved = jax.device_put(cast, [self._target[i] for i in group])
            for i, x in zip(group, moved, strict=True):
                out[i] = x if out[i] is None else out[i]
        return jax.tree.unflatten(self._tree, out)

    def report(self) -> Report:
        """Compiles the programs and reads what they do; nothing is moved, no array is made.

        Raises:
          ValueError: between different devices, where no program of ours moves anything.
        """
        if not self._same_devices:
            raise ValueError(
                "the layouts are on different devices, or on the same in another order: leaves go "
                "by jax.device_put, and there is no compiled program to report on"
            )
        devices = self._target[0].mesh.size
        received, temporary, kinds = 0.0, 0, {}
        for group, program in zip(self._groups, self._programs, strict=True):
            args = [
                jax.ShapeDtypeStruct(
                    self._like[i].shape, self._like[i].dtype, sharding=self._source[i]
                )
                for i in group
            ]
            compiled: Any = program.lower(args).compile()  # pyright: ignore
            for c in collectives.read(compiled.as_text(), devices):
                received += c.received_bytes
                kinds[c.kind] = kinds.get(c.kind, 0) + 1
            temporary = max(temporary, compiled.memory_analysis().temp_size_in_bytes)
        least = sum(
            least_bytes(self._source[i], self._target[i], x.shape, self._itemsize(i))
            for i, x in enumerate(self._like)
        )
        largest = max(sum(self._written(i) for i in group) for group in self._groups)
        return Report(received, least, temporary, largest, kinds)


def make_reshard(
    spec: Any,
    source: rules.Layout,
    target: rules.Layout,
    dtype: Any = None,
    *,
    group_bytes: int = GROUP_BYTES,
    donate: bool = False,
) -> Reshard:
    """Returns move(params) -> params in `target`'s layout; values are bit-equal but for the cast.

    Leaves move in groups, one compiled program each, so that what a move needs beside its result
    stays below the largest group. Between different devices leaves go by `jax.device_put`.

    Args:
      spec: the tree of parameter descriptions (`models.spec.specs`), float32 in `source`.
      dtype: cast before the move (None keeps float32), so that half the bytes travel.
      group_bytes: bytes a device writes in one group; a larger leaf is a group of its own.
      donate: gives the source's buffers up, where the caller needs them no more.
    """
    like = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, "float32"),
        spec,
        is_leaf=lambda p: hasattr(p, "axes"),
    )
    return Reshard(like, source.tree(spec), target.tree(spec), dtype, group_bytes, donate)
