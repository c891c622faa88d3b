"""Rows of a data set and their order: JSON Lines, JSON and TFDS sources, a stream that resumes.

A source is a plain list of dictionaries. TFDS is read as array_record through `as_data_source`,
which needs neither TensorFlow nor a network.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
Row = dict[str, Any]


class PromptStream(Generic[T]):
    """Endless shuffled passes over `examples`; its state is `position`, the number handed out.

    Pass e visits the rows in the order RandomState([seed, e]).permutation(len), a stream that NumPy
    has frozen (NEP 19), so position and seed alone decide the next batch: no worker, buffer or
    iterator has to be restored. Batches run on across the end of a pass; one that does may hold a
    row twice, so number groups by their place in the batch.
    """

    def __init__(self, examples: Sequence[T], seed: int = 0, position: int = 0) -> None:
        if not len(examples):
            raise ValueError("a prompt stream needs at least one example; the data set is empty")
        if position < 0:
            raise ValueError(f"position {position} is negative; it counts the examples handed out")
        self.examples = examples
        self.seed = seed
        self.position = position
        self._pass = -1
        self._order = np.zeros(0, np.int64)

    @property
    def epoch(self) -> int:
        """Number of the pass that the next example belongs to."""
        return self.position // len(self.examples)

    def next(self, n: int) -> list[T]:
        """Returns the next `n` examples and moves on."""
        taken = []
        for position in range(self.position, self.position + n):
            epoch, place = divmod(position, len(self.examples))
            if epoch != self._pass:
                shuffle = np.random.RandomState([self.seed, epoch])
                self._pass, self._order = epoch, shuffle.permutation(len(self.examples))
            taken.append(self.examples[self._order[place]])
        self.position += n
        return taken

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: three integers."""
        return {"position": self.position, "seed": self.seed, "rows": len(self.examples)}

    def load(self, state: Mapping[str, int]) -> None:
        """Continues where `state` was taken; refuses a state of other rows or another seed."""
        here = self.state()
        for name in ("rows", "seed"):
            if int(state[name]) != here[name]:
                raise ValueError(
                    f"the saved data position belongs to {name}={state[name]}, but this run has "
                    f"{name}={here[name]}; resume with the data set and seed of the first run"
                )
        self.position = int(state["position"])


def batches(examples: Sequence[T], n: int) -> Iterator[list[T]]:
    """Yields each example exactly once, in order, `n` at a time; the last batch may be shorter."""
    if n < 1:
        raise ValueError(f"batch size {n} is below 1")
    for start in range(0, len(examples), n):
        yield list(examples[start : start + n])


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a .jsonl, .jsonl.gz or .json (a list of objects) file; blank lines are passed over.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if the file is empty, or a line is no JSON object (the message has its number).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give a .jsonl, .jsonl.gz or .json file")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig") as file:
        if path.suffix == ".json":
            rows = _parse(file.read(), str(path))
            if not isinstance(rows, list):
                raise ValueError(f"{path} holds a {type(rows).__name__}, not a list of objects")
            places = [f"{path}, item {i}" for i in range(len(rows))]
        else:
            lines = [(i, line) for i, line in enumerate(file, start=1) if line.strip()]
            places = [f"{path}, line {i}" for i, _ in lines]
            rows = [_parse(line, place) for place, (_, line) in zip(places, lines, strict=True)]
    for place, row in zip(places, rows, strict=True):
        if not isinstance(row, dict):
            raise ValueError(f"{place}: a {type(row).__name__}, not a JSON object with columns")
    if not rows:
        raise ValueError(f"{path} holds no rows; a data set needs at least one")
    return rows


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not valid JSON ({error}); correct or delete it") from None


def read_tfds(data_dir: str | Path, name: str, split: str = "train") -> list[Row]:
    """Rows of a split ("train", "test[:10%]") of a data set prepared in `data_dir`.

    Never downloads and does not import TensorFlow. The folder alone is enough, whichever program
    prepared it, as long as its records are array_record.

    Raises:
      FileNotFoundError: if `data_dir` holds no data set `name`.
    """
    import tensorflow_datasets as tfds

    if "://" not in str(data_dir) and not (Path(data_dir) / name).is_dir():
        raise FileNotFoundError(
            f"{data_dir} holds no prepared data set {name!r}; prepare it with "
            f"rljax.data.prompts.write_tfds(data_dir, {name!r}, {{'train': rows}}), or give the "
            f"folder above {name!r}"
        )
    try:
        source = tfds.data_source(name, split=split, data_dir=str(data_dir), download=False)
    except NotImplementedError as error:
        raise ValueError(
            f"{data_dir}/{name} cannot be read at random ({error}); prepare it again with "
            "file_format='array_record'"
        ) from None
    return [{k: _decoded(v) for k, v in row.items()} for row in source]  # pyright: ignore


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value


def write_tfds(data_dir: str | Path, name: str, splits: Mapping[str, Sequence[Row]]) -> Path:
    """Prepares `splits` as the TFDS data set `name` under `data_dir`; returns its folder.

    The records are array_record.

    Every column becomes a text: strings as they are, anything else as JSON. Columns are those of
    the first row.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import registered

    columns = list(next(iter(splits.values()))[0])

    def info(self: Any) -> Any:
        features = tfds.features.FeaturesDict({c: tfds.features.Text() for c in columns})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def generate(self: Any, rows: Sequence[Row]) -> Iterator[tuple[int, Row]]:
        for i, row in enumerate(rows):
            texts = {c: row[c] if isinstance(row[c], str) else json.dumps(row[c]) for c in columns}
            yield i, texts

    def split_generators(self: Any, dl_manager: Any) -> Any:
        del dl_manager  # the rows are here
        return {split: self._generate_examples(rows) for split, rows in splits.items()}

    body = {
        "VERSION": tfds.core.Version("1.0.0"),
        "RELEASE_NOTES": {"1.0.0": "written by rljax"},
        "name": name,
        "_info": info,
        "_generate_examples": generate,
        "_split_generators": split_generators,
        "__module__": __name__,  # TFDS looks up the file of the class
    }
    with registered.skip_registration():  # the name may be that of a builder TFDS ships
        builder = type("Rows", (tfds.core.GeneratorBasedBuilder,), body)(
            data_dir=str(data_dir), file_format="array_record"
        )
    config = tfds.download.DownloadConfig(
        try_download_gcs=False, compute_stats=tfds.download.ComputeStatsMode.SKIP
    )
    builder.download_and_prepare(download_config=config)
    return Path(builder.data_path)
