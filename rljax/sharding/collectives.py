"""Reads the collectives of a compiled program from its optimised text, with the bytes they move."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

_OP = re.compile(
    r"= (?P<type>.+?) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9]*)[a-z0-9]*\[(?P<shape>[0-9,]*)\]")
_IOTA = re.compile(r"replica_groups=\[[0-9]+,(?P<size>[0-9]+)\]")
_AXES = re.compile(r"replica_groups=mesh\[(?P<sizes>[^\]]*)\][^{]*\{(?P<axes>[^}]*)\}")
_LISTED = re.compile(r"replica_groups=\{\{(?P<first>[0-9,]+)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
      kind: "all-gather", "all-to-all", "all-reduce", "reduce-scatter" or "collective-permute".
      dtype: of its result, in the program's own name ("f32", "bf16").
      result_bytes: bytes of its result on one device.
      group: devices that take part in it together; 1 for a permute.
    """

    kind: str
    dtype: str
    result_bytes: int
    group: int

    @property
    def received_bytes(self) -> float:
        """Bytes a device receives: what it gets of the result that it did not hold."""
        n = self.group
        factor = {
            "collective-permute": 1.0,
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": n - 1.0,
        }.get(self.kind, (n - 1) / n)
        return self.result_bytes * factor


def read(text: str, devices: int) -> list[Collective]:
    """Collectives of `compiled.as_text()`, each once: a loop's body counts as one trip.

    Args:
      devices: of the program; the group of a collective that names none.
    """
    found = []
    for line in text.splitlines():
        op = _OP.search(line)
        if op is None:
            continue
        arrays = [
            (a["dtype"], math.prod(int(n) for n in a["shape"].split(",") if n))
            for a in _ARRAY.finditer(op["type"])
        ]
        if op["start"]:  # operands, then results (then, for a permute, two counters)
            arrays = arrays[1:2] if op["kind"] == "collective-permute" else arrays[-1:]
        size = sum(count * _itemsize(dtype) for dtype, count in arrays)
        group = 1 if op["kind"] == "collective-permute" else _group(line, devices)
        found.append(Collective(op["kind"], arrays[0][0], size, group))
    return found


def _group(line: str, devices: int) -> int:
    """Size of the groups an instruction names, in any of the three ways XLA writes them."""
    if iota := _IOTA.search(line):
        return int(iota["size"])
    if listed := _LISTED.search(line):
        return listed["first"].count(",") + 1
    if axes := _AXES.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes["sizes"]))
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes["axes"])  # an axis or a part of one
        return math.prod(int(part or sizes[a]) for a, part in named)
    return devices


def _itemsize(name: str) -> int:
    """Bytes of an element type of XLA's text: f32, bf16, u8, s32, pred, f8e4m3fn."""
    bits = re.search(r"[0-9]+", name)
    return max(int(bits[0]) // 8, 1) if bits else np.dtype(bool).itemsize
