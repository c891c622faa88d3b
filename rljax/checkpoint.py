"""Checkpoints of a run on disk: any tree of arrays, and a JSON object of what else must be kept.

A checkpoint is the folder `00000040` of its step, with the arrays in `state` (written by Orbax,
names as in `trees.flatten`) and `meta.json`, which is written last: a folder that has it is
complete. A process killed at any moment leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from rljax import trees

META, STATE = "meta.json", "state"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; says what remains and what to free."""


class Checkpoints:
    """The checkpoints in a folder, of which the newest `keep` are kept.

    An old one is removed after the new one is complete, so that `keep` + 1 of them need room.
    Every process of a run calls `save` and `restore`; the folder belongs to one run.

    Args:
      folder: made by the first `save`.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if "://" in os.fspath(folder):
            raise ValueError(
                f"checkpoint folder {os.fspath(folder)} is a URL; give a path on a local or "
                "mounted file system"
            )
        if keep < 1:
            raise ValueError(f"keep={keep} checkpoints; keep at least 1, to resume from")
        self.folder, self.keep = Path(folder).absolute(), keep  # Orbax wants absolute paths

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, rising."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if _is_step(p) and _is_complete(p))

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, None where there is none."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: Mapping[str, Any] | None = None) -> None:
        """Writes `state` and `meta` as the checkpoint of `step`, and returns when it is complete.

        Args:
          state: a tree of arrays; typed PRNG keys are kept as their data.
          meta: a JSON object: data position, seed, version of the weights.

        Raises:
          CheckpointError: if the disk is full or the folder cannot be written.
          ValueError: if `step` has a checkpoint, or `meta` is no JSON.
        """
        try:
            text = json.dumps(dict(meta or {}), indent=1) + "\n"
        except TypeError as error:
            raise ValueError(
                f"meta of step {step} is no JSON ({error}); convert arrays by int() or .tolist()"
            ) from None
        if step in self.steps():
            raise ValueError(
                f"{self.folder} already has a checkpoint of step {step}; save later steps, or "
                "remove the folder to start over"
            )
        path, leaves = self._path(step), _key_data(trees.flatten(state))
        try:
            with _quiet():
                if jax.process_index() == 0:
                    self._clear()
                    path.mkdir(parents=True)
                _write(path / STATE, trees.unflatten(leaves))
                if jax.process_index() == 0:
                    partial = path / f"{META}.partial"
                    partial.write_text(text)
                    os.replace(partial, path / META)
                if jax.process_count() > 1:
                    multihost_utils.sync_global_devices("rljax checkpoint complete")
        except (OSError, ValueError) as error:
            reason = _storage_reason(error)
            if reason is None:
                raise
            self._clear()
            raise CheckpointError(self._advice(step, reason, trees.size_bytes(leaves))) from error
        if jax.process_index() == 0:
            for old in self.steps()[: -self.keep]:
                _remove(self._path(old))

    def restore(self, step: int, like: Any) -> Any:
        """Returns the state of `step` in the structure and on the devices of `like`.

        Args:
          like: tree of `ShapeDtypeStruct` (with shardings; without, the first device) or arrays.
            The mesh may be another one than that of the run that saved.

        Raises:
          ValueError: naming the leaf, if the two trees differ in names, shapes or dtypes.
        """
        wanted = _key_data(trees.flatten(like))
        self._check(step, wanted, self._saved(step), exact=True)
        return self._read(step, like, wanted, prefix="")

    def restore_params(self, step: int, like_params: Any) -> Any:
        """Returns the leaves under `params` alone, cast to the dtypes of `like_params`.

        For evaluation, sampling and export: nothing need be known of the optimiser or the loss.
        """
        wanted = {f"params/{k}": x for k, x in _key_data(trees.flatten(like_params)).items()}
        saved = {k: x for k, x in self._saved(step).items() if k.startswith("params/")}
        self._check(step, wanted, saved, exact=False)
        return self._read(step, like_params, wanted, prefix="params/")

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON object saved with `step`."""
        return json.loads((self._existing(step) / META).read_text())

    def check_space(self, size_bytes: int) -> None:
        """Refuses to start where the checkpoints of a run will not fit.

        Args:
          size_bytes: of one checkpoint, `trees.size_bytes(state)`.

        Raises:
          CheckpointError: if the free space is less than the checkpoints still to be added, at
            worst `keep` + 1.
        """
        count = max(self.keep + 1 - len(self.steps()), 1)
        free = _free_bytes(self.folder)
        if free < count * size_bytes:
            raise CheckpointError(
                f"{self.folder} has {_gb(free)} free, but a checkpoint takes {_gb(size_bytes)} and "
                f"{count} more of them must fit at once; free {_gb(count * size_bytes - free)}, or "
                "put the run on another disk (--workdir)"
            )

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    def _existing(self, step: int) -> Path:
        if step not in self.steps():
            raise FileNotFoundError(
                f"{self.folder} has no complete checkpoint of step {step}; it has "
                f"{self.steps() or 'none at all'}"
            )
        return self._path(step)

    def _clear(self) -> None:
        """Removes what an interrupted save or removal left."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if _is_step(path) and not _is_complete(path):
                _remove(path)

    def _saved(self, step: int) -> dict[str, Any]:
        metadata = _checkpointer().metadata(self._existing(step) / STATE)
        return trees.flatten(metadata.item_metadata.tree)  # pyright: ignore

    def _check(
        self, step: int, wanted: Mapping[str, Any], saved: Mapping[str, Any], *, exact: bool
    ) -> None:
        place = f"checkpoint {self._path(step)}"
        advice = "use the model, optimiser and loss of the run that saved it, or start a new run"
        for names, fact in (
            (wanted.keys() - saved.keys(), "lacks"),
            (saved.keys() - wanted.keys(), "has, and this run does not know,"),
        ):
            if names:
                shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
                raise ValueError(f"{place} {fact} {len(names)} arrays ({shown}); {advice}")
        for name, x in wanted.items():
            here, there = tuple(x.shape), tuple(saved[name].shape)
            if here != there:
                raise ValueError(f"{place}: {name} has shape {there}, here {here}; {advice}")
            if exact and x.dtype != saved[name].dtype:
                raise ValueError(
                    f"{place}: {name} is {saved[name].dtype}, here {x.dtype}; {advice}"
                )

    def _read(self, step: int, like: Any, wanted: Mapping[str, Any], prefix: str) -> Any:
        first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        item = trees.unflatten(
            {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or first)
                for name, x in wanted.items()
            }
        )
        args = ocp.args.PyTreeRestore(
            item=item,  # pyright: ignore
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),  # pyright: ignore
            partial_restore=True,  # pyright: ignore
        )
        found = trees.flatten(_checkpointer().restore(self._path(step) / STATE, args=args))
        leaves = [_from_data(found[prefix + n], x) for n, x in trees.flatten(like).items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _advice(self, step: int, reason: str, size_bytes: int) -> str:
        last = self.latest()
        kept = "There is no earlier checkpoint." if last is None else (
            f"The last complete checkpoint is that of step {last}; it is intact."
        )  # fmt: skip
        return (
            f"the checkpoint of step {step} could not be written to {self.folder}: {reason}; it "
            f"takes {_gb(size_bytes)} and {_gb(_free_bytes(self.folder))} are free. {kept} Make "
            "room there (old runs, caches) or make the folder writable, then resume the run."
        )


def _checkpointer() -> ocp.Checkpointer:
    # Uncompressed: float32 weights shrink by a tenth, and writing them takes four times as long.
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
    return ocp.Checkpointer(handler)


def _write(path: Path, tree: Any) -> None:
    _checkpointer().save(path, args=ocp.args.PyTreeSave(tree))  # pyright: ignore


def _is_step(path: Path) -> bool:
    return re.fullmatch(r"\d{8,}", path.name) is not None


def _is_complete(path: Path) -> bool:
    return (path / META).exists()


def _remove(path: Path) -> None:
    (path / META).unlink(missing_ok=True)  # first: half a checkpoint must not look complete
    shutil.rmtree(path, ignore_errors=True)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_data(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces typed PRNG keys, abstract ones too, by their uint32 data."""

    def data(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return jax.random.key_data(x)
        inner = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(inner.shape, inner.dtype, sharding=x.sharding)

    return {name: data(x) if _is_key(x) else x for name, x in leaves.items()}


def _from_data(x: jax.Array, like: Any) -> jax.Array:
    if not _is_key(like):
        return x
    kinds = []  # an abstract key tells its kind only while it is traced
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(x, impl=kinds[0])


def _storage_reason(error: Exception) -> str | None:
    """What the file system said, or None if the error is of another kind."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)  # TensorStore hands the system's message on inside a ValueError
    known = re.search(r"No space left on device|Disk quota exceeded|Permission denied", text)
    if known:
        return known[0]
    return text.splitlines()[0][:200] if re.search(r"(?i)os[ _]error", text) else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the tracebacks that Orbax's threads log beside the exception that reaches us.

    After a failure for good: its threads end, and its futures are collected, at some later time.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio", "concurrent.futures")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e7 else f"{size_bytes / 1e3:.0f} kB"
