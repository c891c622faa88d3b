"""Device meshes: the training mesh, and the decode mesh over the same devices in the same order."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")


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
