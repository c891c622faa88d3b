"""Sources of rows and the stream that hands them out: exact resumption, no row lost."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from rljax.data import prompts

ROWS = list("abcdefg")  # 7 rows: no batch size below divides them


def test_each_pass_visits_every_row_once_in_a_new_order():
    stream = prompts.PromptStream(ROWS, seed=3)
    first, second = stream.next(7), stream.next(7)
    assert sorted(first) == sorted(second) == ROWS
    assert first != second
    assert stream.epoch == 2


def test_the_order_of_a_seed_never_changes():
    # RandomState([0, 0]).permutation(7), a stream frozen by NEP 19; printed once with NumPy 2.4.6
    assert "".join(prompts.PromptStream(ROWS, seed=0).next(7)) == "dgeacfb"


@pytest.mark.parametrize("stop", [1, 2, 6, 7, 13, 14, 15])
def test_a_resumed_stream_gives_the_batches_of_an_unbroken_one(stop):
    """FC80, FC81, FC83: at, before and after the end of a pass (7 rows), in the second pass."""
    whole = prompts.PromptStream(ROWS, seed=1)
    whole.next(stop)
    expected = [whole.next(3) for _ in range(6)]

    broken = prompts.PromptStream(ROWS, seed=1)
    broken.next(stop)
    saved = json.loads(json.dumps(broken.state()))  # a checkpoint keeps it as JSON
    resumed = prompts.PromptStream(ROWS, seed=1)
    resumed.load(saved)
    assert [resumed.next(3) for _ in range(6)] == expected
    assert resumed.position == whole.position


def test_batch_size_does_not_change_the_order():
    one, many = prompts.PromptStream(ROWS, seed=2), prompts.PromptStream(ROWS, seed=2)
    assert [x for _ in range(20) for x in one.next(1)] == many.next(20)


def test_a_position_of_another_data_set_is_refused():
    state = prompts.PromptStream(ROWS, seed=1).state()
    with pytest.raises(ValueError, match=r"rows=7.*rows=6"):
        prompts.PromptStream(ROWS[:6], seed=1).load(state)
    with pytest.raises(ValueError, match=r"seed=1.*seed=2"):
        prompts.PromptStream(ROWS, seed=2).load(state)


def test_an_empty_stream_is_refused():
    with pytest.raises(ValueError, match="at least one example"):
        prompts.PromptStream([])


@pytest.mark.parametrize("n", [1, 4, 10, 16])
def test_evaluation_batches_hold_each_row_exactly_once(n):
    """FC60: 10 rows on 4 places are 10 scores, not 8 and not 12."""
    rows = list(range(10))
    cut = list(prompts.batches(rows, n))
    assert [x for batch in cut for x in batch] == rows
    assert max(len(batch) for batch in cut) <= n


def test_rows_are_read_from_every_format(tmp_path):
    rows = [{"q": "é", "a": 1}, {"q": "y", "a": None}]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"  # a blank line at the end
    (tmp_path / "r.jsonl").write_text(text)
    (tmp_path / "r.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "r.jsonl.gz", "wt") as file:
        file.write(text)
    for name in ("r.jsonl", "r.json", "r.jsonl.gz"):
        assert prompts.read_rows(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("a.jsonl", '{"q": 1}\n\n{"q": \n', "line 3: not valid JSON"),
        ("a.jsonl", '{"q": 1}\n[2]\n', "line 2: a list"),
        ("a.jsonl", "\n", "holds no rows"),
        ("a.json", '{"q": 1}', "holds a dict"),
        ("a.json", "[]", "holds no rows"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, text, fact):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=fact) as caught:
        prompts.read_rows(tmp_path / name)
    assert name in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl is not a file; give"):
        prompts.read_rows(tmp_path / "gone.jsonl")


TFDS = """
import sys
from rljax.data import prompts
rows = [{"question": f"q{i} é", "answer": i} for i in range(7)]
folder = prompts.write_tfds(sys.argv[1], "tiny", {"train": rows, "test": rows[:2]})
assert folder.is_dir() and folder.parent.name == "tiny", folder
back = prompts.read_tfds(sys.argv[1], "tiny", "train")
assert back == [{"question": f"q{i} é", "answer": str(i)} for i in range(7)], back
assert len(prompts.read_tfds(sys.argv[1], "tiny", "test")) == 2
assert len(prompts.read_tfds(sys.argv[1], "tiny", "train[2:5]")) == 3
try:
    prompts.read_tfds(sys.argv[1], "other")
except FileNotFoundError as error:
    assert "write_tfds" in str(error)
else:
    raise AssertionError("a data set that is not there was read")
assert "tensorflow" not in sys.modules
"""


def test_tfds_round_trip_needs_no_tensorflow_and_no_network(tmp_path):
    """In a process of its own, so that what other tests imported does not count."""
    pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")
    done = subprocess.run(
        [sys.executable, "-c", TFDS, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
