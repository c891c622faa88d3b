"""Tasks of one prompt and one completion: rows to train on, rows held out, and a reward.

A task knows no tokens and no model. Each maker below returns a Task; `custom` makes one from any
rows and any function.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax import rewards
from rljax.data import prompts as sources

Message = dict[str, str]  # {"role": "user", "content": "..."}


@dataclasses.dataclass(frozen=True)
class Example:
    """One row.

    Attributes:
      uid: number of the row, unique in its task over train and test. Groups go by it, never by the
        text.
      prompt: a text, which the recipe wraps into one user message if the model has a chat template;
        or messages.
      answer: the reference answer, "" where there is none.
      info: anything else the reward may want to know.
    """

    uid: int
    prompt: str | list[Message]
    answer: str = ""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train on and how it is judged.

    Attributes:
      stop: strings that end a completion, such as a line break.
      max_tokens: longest completion.
    """

    name: str
    train: Sequence[Example]
    test: Sequence[Example]
    reward: rewards.Reward
    stop: tuple[str, ...] = ()
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if not callable(self.reward):
            raise ValueError(
                f"task {self.name!r} has no reward function (reward={self.reward!r}); pass a "
                "function of (texts, examples), for instance rljax.rewards.match()"
            )
        if not len(self.train):
            raise ValueError(
                f"task {self.name!r} has no row to train on; ask for more rows or hold out fewer"
            )
        if isinstance(self.stop, str):
            raise ValueError(f"stop={self.stop!r} is one string; write ({self.stop!r},)")
        uids = [example.uid for example in (*self.train, *self.test)]
        if len(set(uids)) < len(uids):
            raise ValueError(
                f"task {self.name!r} uses a row uid twice; number the rows 0, 1, 2, ..."
            )


def custom(
    train: Sequence[Example | str | Mapping[str, Any]],
    reward: rewards.Reward,
    test: Sequence[Example | str | Mapping[str, Any]] = (),
    *,
    name: str = "custom",
    stop: tuple[str, ...] = (),
    max_tokens: int = 256,
) -> Task:
    """A task from rows in memory.

    A row is a prompt, or {"prompt": ..., "answer": ...} whose other columns go to `info`, or an
    Example, which gets a new uid.
    """

    def example(uid: int, row: Example | str | Mapping[str, Any]) -> Example:
        if isinstance(row, Example):
            return dataclasses.replace(row, uid=uid)
        columns = {"prompt": row} if isinstance(row, str) else row
        return _from_row(uid, {"answer": "", **columns}, "prompt", "answer", f"{name}, row {uid}")

    examples = [example(uid, row) for uid, row in enumerate((*train, *test))]
    return Task(name, examples[: len(train)], examples[len(train) :], reward, stop, max_tokens)


def arithmetic(
    digits: int = 1,
    operations: str = "+",
    held_out: int = 25,
    seed: int = 0,
    *,
    train_rows: int = 1000,
    template: str = "What is {a} {op} {b}?",
    stop_at_newline: bool = True,
    max_tokens: int = 28,
) -> Task:
    """Sums, differences or products of two numbers; right if the first line ends in the result.

    One-digit numbers are 0 to 9: 100 sums, of which `held_out` are never trained on. A difference
    has a >= b. From two digits on, `train_rows` problems are drawn for training and `held_out`
    others for the test. 2 + 3 and 3 + 2 are two problems.
    """
    operations = "".join(dict.fromkeys(operations))  # each once, or train and test would overlap
    if not 1 <= digits <= 18 or not operations or set(operations) - set("+-*"):
        raise ValueError(
            f"digits={digits}, operations={operations!r}; use 1 to 18 digits and some of '+-*'"
        )
    problems = _problems(digits, operations, held_out + train_rows, seed)
    if held_out >= len(problems):
        raise ValueError(
            f"held_out={held_out} leaves none of the {len(problems)} problems for training; hold "
            "out fewer"
        )

    def row(a: int, op: str, b: int) -> dict[str, str]:
        try:
            prompt = template.format(a=a, op=op, b=b)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"template {template!r} has an unknown field {error}; the fields are {{a}}, "
                f"{{op}} and {{b}}"
            ) from None
        result = {"+": a + b, "-": a - b, "*": a * b}[op]
        return {"prompt": prompt, "answer": str(result)}

    rows = [row(*problem) for problem in problems]
    return custom(
        rows[held_out:][:train_rows],
        rewards.match(rewards.first_line),
        rows[:held_out],
        name=f"arithmetic_{digits}",
        stop=("\n",) if stop_at_newline else (),
        max_tokens=max_tokens,
    )


def _problems(digits: int, operations: str, wanted: int, seed: int) -> list[tuple[int, str, int]]:
    """Different problems in random order: all of them up to two digits, else `wanted` of them."""
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
    random = np.random.RandomState(seed)  # a frozen stream: a seed means the same split for ever
    if digits <= 2:
        numbers = range(low, high)
        every = [
            (a, op, b) for op in operations for a in numbers for b in numbers if op != "-" or a >= b
        ]
        return [every[i] for i in random.permutation(len(every))]
    drawn: dict[tuple[int, str, int], None] = {}  # keeps the order, drops repeats
    while len(drawn) < wanted:
        a, b = (int(n) for n in random.randint(low, high, size=2, dtype=np.int64))
        op = operations[random.randint(len(operations))]
        drawn[(max(a, b), op, min(a, b)) if op == "-" else (a, op, b)] = None
    return list(drawn)


def gsm8k(
    path: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    template: str = "{question}",
    max_tokens: int = 320,
) -> Task:
    """Grade-school word problems; right if the stated number is the answer's.

    Cobbe et al., arXiv:2110.14168.

    The completion's number is the last one in \\boxed{}, after ####, or in the whole text, in this
    order.

    Args:
      path: folder with train.jsonl and test.jsonl (question, answer ending in "#### number").
      data_dir: or a TFDS folder that holds "gsm8k" prepared as array_record
        (`rljax.data.prompts.write_tfds`).
    """
    if (path is None) == (data_dir is None):
        raise ValueError("gsm8k takes either path= (a JSONL folder) or data_dir= (a TFDS folder)")

    def rows(split: str) -> list[dict[str, str]]:
        if data_dir is not None:
            raw, place = sources.read_tfds(data_dir, "gsm8k", split), f"{data_dir}, {split}"
        else:
            file = Path(path or "") / f"{split}.jsonl"
            raw, place = sources.read_rows(file), str(file)
        examples = (_from_row(i, r, "question", "answer", place) for i, r in enumerate(raw))
        return [
            {
                "prompt": template.format(question=e.prompt),
                "answer": e.answer.split("####")[-1].strip(),
                "solution": e.answer,
            }
            for e in examples
        ]

    reward = rewards.match(rewards.stated)
    return custom(rows("train"), reward, rows("test"), name="gsm8k", max_tokens=max_tokens)


def jsonl(
    path: str | Path,
    prompt: str = "question",
    answer: str | None = "answer",
    *,
    reward: rewards.Reward | None = None,
    test_path: str | Path | None = None,
    held_out: int = 0,
    stop: tuple[str, ...] = (),
    max_tokens: int = 256,
) -> Task:
    """A task from a .jsonl, .jsonl.gz or .json file with the columns named `prompt` and `answer`.

    The other columns go to `info`, an "info" column (an object or null) is merged into it. Without
    `reward` a completion is right if the answer it states (boxed, after ####, or the whole text) is
    the row's.

    Args:
      answer: None where the reward needs no reference.
      test_path: file of the rows to test on; or hold out the last `held_out` rows of `path`.
    """
    if reward is None and answer is None:
        raise ValueError(
            "rows without an answer column need reward=, a function of (texts, examples)"
        )

    def rows(file: str | Path) -> list[Example]:
        read = enumerate(sources.read_rows(file))
        return [_from_row(i, row, prompt, answer, f"{file}, row {i + 1}") for i, row in read]

    train = rows(path)
    test = rows(test_path) if test_path is not None else train[len(train) - held_out :]
    return custom(
        train if test_path is not None else train[: max(len(train) - held_out, 0)],
        reward or rewards.match(rewards.stated),
        test,
        name=Path(path).name.split(".")[0],
        stop=stop,
        max_tokens=max_tokens,
    )


def _from_row(
    uid: int, row: Mapping[str, Any], prompt: str, answer: str | None, place: str
) -> Example:
    for column in (prompt, answer):
        if column is not None and column not in row:
            raise ValueError(f"{place} has no column {column!r}; its columns are {sorted(row)}")
    text = row[prompt]
    messages = isinstance(text, list) and all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in text
    )
    if not text or not (isinstance(text, str) or messages):
        raise ValueError(
            f"{place}: column {prompt!r} holds {text!r}; a prompt is a text or a list of messages "
            "with role and content"
        )
    info = row.get("info")
    if not isinstance(info, dict | None):
        raise ValueError(f"{place}: column 'info' holds {info!r}; it must be an object or null")
    rest = {k: v for k, v in row.items() if k not in (prompt, answer, "info")}
    gold = None if answer is None else row[answer]
    return Example(uid, text, "" if gold is None else str(gold), {**rest, **(info or {})})


def reasoning_gym(
    name: str,
    *,
    train_rows: int = 500,
    held_out: int = 50,
    seed: int = 0,
    extract: Callable[[str], str] = rewards.first_line,
    stop: tuple[str, ...] = ("\n",),
    max_tokens: int = 64,
    **settings: Any,
) -> Task:
    """A task of the package reasoning-gym by name, with the generator's `settings`.

    Stojanovski et al., arXiv:2505.24760.

    Where the answer is a number, the last number that `extract` leaves must equal it; otherwise the
    generator's own score of the extracted text counts. The package's scorer alone gives almost
    nothing to a right answer inside a sentence. Questions of the test are taken out of the training
    rows, which matters for small problem spaces.
    """
    try:
        import reasoning_gym as gym
        from reasoning_gym import factory
    except ImportError:
        raise ImportError(
            f"task {name!r} needs reasoning-gym; install it with: pip install reasoning-gym"
        ) from None
    if name not in factory.DATASETS:
        near = difflib.get_close_matches(name, factory.DATASETS, n=3) or sorted(factory.DATASETS)
        raise ValueError(f"reasoning-gym has no task {name!r}; did you mean {', '.join(near)}?")
    known = [f.name for f in dataclasses.fields(factory.DATASETS[name][1])]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{name} has no setting {unknown}; its settings are {sorted(known)}")
    generator = gym.create_dataset(name, seed=seed, size=train_rows + held_out, **settings)

    def row(i: int) -> dict[str, Any]:
        entry = generator[i]
        return {"prompt": entry["question"], "answer": entry["answer"], "info": entry["metadata"]}

    test = [row(i) for i in range(held_out)]
    asked = {r["prompt"] for r in test}
    train = [row(i) for i in range(held_out, held_out + train_rows)]

    def score(text: str, example: Example) -> float:
        found = extract(text)
        if rewards.whole_number(example.answer) is not None:
            return float(rewards.same(found, example.answer))
        entry = {"question": example.prompt, "answer": example.answer, "metadata": example.info}
        return float(generator.score_answer(answer=found, entry=entry))

    score.__name__ = f"reasoning_gym_{name}"
    kept = [r for r in train if r["prompt"] not in asked]
    reward = rewards.each(score)
    return custom(kept, reward, test, name=name, stop=stop, max_tokens=max_tokens)


# Openings in the vocabulary of TinyStories (Eldan and Li, arXiv:2305.07759), for models trained on
# it.
STORY_OPENINGS = (
    "Once upon a time, there was a little girl named Lily.",
    "Once upon a time, there was a little boy named Tim.",
    "One day, a dog named Max went to the park.",
    "Tom and his mom went to the store.",
    "There was a big tree in the garden.",
    "A little bird sat on the roof.",
    "Ben found a red ball in the grass.",
    "One day, Sam saw a cat in the rain.",
    "Mia had a new toy car.",
    "The sun was up, and Anna wanted to play.",
    "Once upon a time, there was a small fish in a pond.",
    "Jack and Sue went for a walk in the woods.",
)


def sentiment(
    prompts: Sequence[str] = STORY_OPENINGS,
    *,
    held_out: int | None = None,
    sign: float = 1.0,
    max_tokens: int = 64,
) -> Task:
    """Continue a text cheerfully, or gloomily with sign=-1; the reward is VADER's compound score.

    Args:
      held_out: number of prompts, from the end of the list, kept for the test; a quarter of them if
        None.
    """
    held_out = math.floor(len(prompts) / 4) if held_out is None else held_out
    cut = max(len(prompts) - held_out, 0)
    reward = rewards.cheerfulness(sign)
    return custom(prompts[:cut], reward, prompts[cut:], name="sentiment", max_tokens=max_tokens)
