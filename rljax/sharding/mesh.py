"""Device meshes: the training mesh, and the decode mesh over the same devices in the same order."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")
DECODE_AXES = ("data", "extra", "tensor", "micro")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; -1 takes what the others leave (at most one axis).

    `data` splits the batch, `fsdp` the batch and the parameters, `tensor` heads, feed-forward
    and vocabulary.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


def make_mesh(cfg: MeshConfig, devices: Any = None) -> Mesh:
    """Returns a mesh with axes (data, fsdp, tensor) over `devices`, by default all of them.

    Axes are Auto: the compiler propagates shardings between our constraints.

    Raises:
      ValueError: if the sizes do not multiply to the number of devices.
    """
    flat = np.asarray(jax.devices() if devices is None else devices).reshape(-1)
    sizes = [cfg.data, cfg.fsdp, cfg.tensor]
    named = ", ".join(f"{a}={s}" for a, s in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ValueError(f"mesh {named}: sizes are positive, and at most one is -1 (the rest)")
    known = math.prod(s for s in sizes if s != -1)
    if flat.size % known or (-1 not in sizes and known != flat.size):
        raise ValueError(
            f"mesh {named} needs {known} devices (or a divisor with one axis at -1); this run has "
            f"{flat.size}. Choose sizes whose product is {flat.size}."
        )
    sizes = [flat.size // known if s == -1 else s for s in sizes]
    return Mesh(flat.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def make_decode_mesh(cfg: MeshConfig, train: Mesh) -> Mesh:
    """Returns the decode mesh over the training mesh's devices, in the same order.

    Its axes are (data, extra, tensor, micro). Of a training tensor axis wider than the decode one
    the major factor is kept and the minor one, micro, joins the batch: each training shard is a
    slice of its decode shard. A narrower one is widened by extra, the minor factor of data and
    fsdp. Weights are split over (tensor, extra), sequences over (data, micro).

    Args:
      cfg: sizes in decoding; fsdp is 1, -1 takes what the others leave.

    Raises:
      ValueError: if the sizes do not fit the devices, or the training tensor axis.
    """
    whole = make_mesh(cfg, train.devices)
    if whole.shape["fsdp"] > 1:
        raise ValueError("the decode mesh splits no weights over fsdp; set decode.mesh.fsdp to 1")
    tensor, before = whole.shape["tensor"], train.shape["tensor"]
    if before % tensor and tensor % before:
        sizes = [n for n in range(1, train.size + 1) if train.size % n == 0]
        fits = [n for n in sizes if before % n == 0 or n % before == 0]
        raise ValueError(
            f"decode.mesh.tensor={tensor} beside mesh.tensor={before}: one must divide the other, "
            f"so that shards are slices of shards; sizes that work: {fits}"
        )
    keep, extra = min(tensor, before), max(tensor // before, 1)
    shape = (-1, extra, keep, before // keep)
    return Mesh(train.devices.reshape(shape), DECODE_AXES, axis_types=(AxisType.Auto,) * 4)
