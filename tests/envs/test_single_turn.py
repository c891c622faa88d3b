"""Tasks: which rows there are, how they are split and numbered, and what their answers score."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import rljax
from rljax import envs, rewards
from rljax.data import prompts

BUILTIN = {  # every task that needs no file
    "arithmetic": lambda: envs.arithmetic(),
    "arithmetic_2": lambda: rljax.envs.arithmetic(digits=2),
    "sentiment": lambda: envs.sentiment(),
    "custom": lambda: envs.custom(
        [{"prompt": "a", "answer": "1"}] * 2, rewards.match(), [{"prompt": "b", "answer": "x"}]
    ),
}


@pytest.mark.parametrize("name", BUILTIN)
def test_every_task_scores_an_empty_completion(name):
    """FC51: length 0 is a completion like any other."""
    if name == "sentiment":
        pytest.importorskip("vader")
    task = BUILTIN[name]()
    rows = [*task.train[:2], *task.test[:1]]
    scores = rewards.call_reward(task.reward, [""] * len(rows), rows)
    assert scores.value.tolist() == [0.0] * len(rows)
    assert scores.scored.all()


@pytest.mark.parametrize("name", BUILTIN)
def test_uids_are_unique_over_train_and_test(name):
    if name == "sentiment":
        pytest.importorskip("vader")
    task = BUILTIN[name]()
    uids = [row.uid for row in (*task.train, *task.test)]
    assert uids == list(range(len(uids)))


def test_one_digit_addition_holds_out_25_of_its_100_problems():
    task = envs.arithmetic()
    train = {str(row.prompt) for row in task.train}
    test = {str(row.prompt) for row in task.test}
    assert (len(task.train), len(task.test)) == (75, 25)
    assert train | test == {f"What is {a} + {b}?" for a in range(10) for b in range(10)}
    assert task.stop == ("\n",)


def test_the_split_follows_the_seed_alone():
    def held_out(seed):
        return [row.prompt for row in envs.arithmetic(seed=seed).test]

    assert held_out(0) == held_out(0) != held_out(1)
    # printed once: RandomState(0).permutation(100)[:3] is 26, 86, 2, that is 2 + 6, 8 + 6, 0 + 2
    assert held_out(0)[:3] == ["What is 2 + 6?", "What is 8 + 6?", "What is 0 + 2?"]


@pytest.mark.parametrize(
    ("digits", "operations", "problems"),
    [(1, "-", 55), (1, "*", 100), (1, "+-*", 255), (1, "++", 100)],  # 55 = pairs with a >= b
)
def test_every_problem_of_one_digit_occurs_once(digits, operations, problems):
    task = envs.arithmetic(digits, operations, held_out=20)
    texts = [row.prompt for row in (*task.train, *task.test)]
    assert len(texts) == len(set(texts)) == problems


@pytest.mark.parametrize("digits", [2, 3, 9])
def test_longer_numbers_are_drawn_without_overlap(digits):
    task = envs.arithmetic(digits, "+-*", held_out=30, train_rows=200)
    texts = [row.prompt for row in (*task.train, *task.test)]
    assert (len(task.train), len(task.test), len(set(texts))) == (200, 30, 230)
    for row in (*task.train, *task.test):
        left, op, right = str(row.prompt).removeprefix("What is ").removesuffix("?").split()
        assert len(left) == len(right) == digits
        assert (
            int(row.answer)
            == {  # Python's own arithmetic
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
            }[op]
        )
        assert int(row.answer) >= 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("7 + 5 = 12", 1.0), ("\n12\n13", 1.0), ("13\n12", 0.0), ("twelve", 0.0), ("-12", 0.0)],
)
def test_the_last_number_of_the_first_line_is_the_answer(text, value):
    task = envs.arithmetic()
    row = SimpleNamespace(uid=0, answer="12")
    assert task.reward([text], [row]) == [value]


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"operations": "/"}, "operations='/'"),
        ({"digits": 0}, "digits=0"),
        ({"held_out": 100}, "leaves none of the 100 problems"),
        ({"template": "{x} + {b}"}, "unknown field 'x'.*{a}, {op} and {b}"),
    ],
)
def test_a_wrong_setting_of_arithmetic_is_explained(settings, fact):
    with pytest.raises(ValueError, match=fact):
        envs.arithmetic(**settings)


def test_rows_with_the_same_text_stay_two_rows():
    """FC16: groups go by uid, so the same question twice is two groups."""
    task = envs.custom([{"prompt": "q", "answer": "1"}, {"prompt": "q", "answer": "2"}], print)  # pyright: ignore
    assert [row.uid for row in task.train] == [0, 1]
    assert [row.uid for row in prompts.PromptStream(task.train).next(2)] in ([0, 1], [1, 0])


def test_a_task_without_reward_or_rows_is_refused_when_it_is_built():
    """FC57: a missing reward function is a message at construction."""
    with pytest.raises(ValueError, match="no reward function"):
        envs.custom(["a"], None)  # pyright: ignore
    with pytest.raises(ValueError, match="no row to train on"):
        envs.custom([], rewards.match())
    with pytest.raises(ValueError, match="one string"):
        envs.custom(["a"], rewards.match(), stop="\n")  # pyright: ignore
    with pytest.raises(ValueError, match="uid twice"):
        row = envs.Example(0, "a")
        envs.Task("t", [row], [row], rewards.match())


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_becomes_a_task(tmp_path):
    rows = [{"q": f"{i} + {i}", "a": 2 * i, "level": i % 3} for i in range(10)]
    task = envs.jsonl(write(tmp_path / "sums.jsonl", rows), prompt="q", answer="a", held_out=3)
    assert task.name == "sums"
    assert [row.prompt for row in task.train] == [f"{i} + {i}" for i in range(7)]
    assert [row.answer for row in task.test] == ["14", "16", "18"]
    assert task.train[4].info == {"level": 1}
    assert task.reward(["it is 8", "9"], task.train[4:6]) == [1.0, 0.0]
    other = envs.jsonl(
        tmp_path / "sums.jsonl", prompt="q", answer="a", test_path=tmp_path / "sums.jsonl"
    )
    assert (len(other.train), len(other.test)) == (10, 10)


def test_a_null_info_is_an_empty_mapping(tmp_path):
    """FC58: the reward sees {} where the column is null or absent."""
    rows = [
        {"question": "a", "answer": "1", "info": {"unit": "cm"}},
        {"question": "b", "answer": None, "info": None},
        {"question": "c", "answer": "3"},
    ]
    task = envs.jsonl(
        write(tmp_path / "r.jsonl", rows),
        reward=rewards.each(lambda text, row: float(row.info.get("unit", "") == text)),
    )
    assert [row.info for row in task.train] == [{"unit": "cm"}, {}, {}]
    assert task.train[1].answer == ""
    assert task.reward(["cm", "cm", "cm"], task.train) == [1.0, 0.0, 0.0]


def test_a_prompt_may_be_messages(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "r.jsonl", [{"question": messages, "answer": "1"}])
    assert envs.jsonl(path).train[0].prompt == messages


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ({"problem": "a", "solution": "1"}, r"row 2 has no column 'question'.*'problem'"),
        ({"question": "a"}, r"no column 'answer'; its columns are \['question'\]"),
        ({"question": "", "answer": "1"}, "row 2: column 'question' holds ''"),
        ({"question": None, "answer": "1"}, "holds None"),
        ({"question": [{"text": "a"}], "answer": "1"}, "messages with role and content"),
        ({"question": "a", "answer": "1", "info": "x"}, "'info' holds 'x'"),
    ],
)
def test_a_bad_row_is_named_with_its_columns(tmp_path, row, fact):
    path = write(tmp_path / "r.jsonl", [{"question": "q", "answer": "1"}, row])
    with pytest.raises(ValueError, match=fact):
        envs.jsonl(path)


def test_a_file_without_rows_or_without_reference_is_refused(tmp_path):
    (tmp_path / "r.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no rows"):
        envs.jsonl(tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match="need reward="):
        envs.jsonl(tmp_path / "r.jsonl", answer=None)
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        envs.jsonl(tmp_path / "gone.jsonl")


GSM8K = [
    {"question": f"How many are {i} and 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>\n#### {i + 1:,}"}
    for i in range(998, 1003)
]


@pytest.fixture
def gsm8k_folder(tmp_path):
    write(tmp_path / "train.jsonl", GSM8K)
    write(tmp_path / "test.jsonl", GSM8K[:2])
    return tmp_path


def test_gsm8k_is_read_from_json_lines(gsm8k_folder):
    task = envs.gsm8k(gsm8k_folder, template="{question} Think.")
    assert task.train[1].prompt == "How many are 999 and 1? Think."
    assert [row.answer for row in task.test] == ["999", "1,000"]
    texts = ["So 1000.", "It is \\boxed{1000}, not 3", "#### 1,000\n7", "1000 and 3", ""]
    assert task.reward(texts, [task.test[1]] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_gsm8k_is_the_same_from_tfds(gsm8k_folder, tmp_path):
    pytest.importorskip("tensorflow_datasets")
    data_dir = tmp_path / "tfds"
    splits = {s: prompts.read_rows(gsm8k_folder / f"{s}.jsonl") for s in ("train", "test")}
    prompts.write_tfds(data_dir, "gsm8k", splits)
    by_tfds, by_file = envs.gsm8k(data_dir=data_dir), envs.gsm8k(gsm8k_folder)
    assert by_tfds.train == by_file.train
    assert by_tfds.test == by_file.test


def test_gsm8k_from_the_builder_of_tfds_itself(gsm8k_folder, tmp_path):
    """A folder that tensorflow-datasets' own gsm8k builder prepared, here from local files."""
    tfds = pytest.importorskip("tensorflow_datasets")
    gsm8k = pytest.importorskip("tensorflow_datasets.text.gsm8k.gsm8k")
    with tfds.core.registered.skip_registration():

        class Gsm8k(gsm8k.Gsm8k):
            def _split_generators(self, dl_manager):
                files = {s: gsm8k_folder / f"{s}.jsonl" for s in ("train", "test")}
                return {s: self._generate_examples(file) for s, file in files.items()}

    Gsm8k(data_dir=tmp_path / "own", file_format="array_record").download_and_prepare()
    task = envs.gsm8k(data_dir=tmp_path / "own")
    # this builder shuffles its rows on disk, always the same way
    assert {(r.prompt, r.answer) for r in task.train} == {
        (r.prompt, r.answer) for r in envs.gsm8k(gsm8k_folder).train
    }


def test_gsm8k_says_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match="either path="):
        envs.gsm8k()
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl"):
        envs.gsm8k(tmp_path)
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(FileNotFoundError, match=r"no prepared data set 'gsm8k'.*write_tfds"):
        envs.gsm8k(data_dir=tmp_path)


def test_the_real_gsm8k_has_its_published_size(shared):
    task = envs.gsm8k(shared("data/gsm8k"))
    assert (len(task.train), len(task.test)) == (7473, 1319)  # data/SOURCES.md
    solutions = [row.info["solution"] for row in task.test]
    assert task.reward(solutions, task.test) == [1.0] * 1319


def test_a_real_math_file_is_a_task(shared):
    task = envs.jsonl(
        shared("data/math/math500.jsonl"), prompt="problem", answer="answer", held_out=100
    )
    assert (len(task.train), len(task.test)) == (400, 100)
    assert {"solution", "level", "subject"} <= set(task.train[0].info)


def test_story_openings_are_split(shared):
    pytest.importorskip("vader")
    task = envs.sentiment()
    assert (len(task.train), len(task.test)) == (9, 3)
    own = envs.sentiment(["The film was"], held_out=0, sign=-1.0)
    assert [row.prompt for row in own.train] == ["The film was"]
    (value,) = own.reward(["great and fun"], own.train)
    assert value is not None and value < -0.5


def test_any_python_function_is_a_reward():
    task = envs.custom(["a", "b"], lambda texts, examples: [len(t) for t in texts])
    scores = rewards.call_reward(task.reward, ["xyz", ""], task.train)
    assert scores.value.tolist() == [3.0, 0.0]


@pytest.fixture(scope="module")
def gym():
    return pytest.importorskip("reasoning_gym")


def test_a_number_in_a_sentence_is_right_in_reasoning_gym(gym):
    """The package's own scorer gives a right answer inside a sentence about 0.02."""
    settings: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = envs.reasoning_gym("chain_sum", train_rows=40, held_out=10, **settings)
    row = task.test[0]
    texts = [f"The answer is {row.answer}.", f"{row.answer}", f"{row.answer} 99", ""]
    assert task.reward(texts, [row] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert len(task.test) == 10
    assert not {str(r.prompt) for r in task.train} & {str(r.prompt) for r in task.test}
    again = envs.reasoning_gym("chain_sum", train_rows=40, held_out=10, **settings)
    assert again.train == task.train


def test_other_answers_go_to_the_generators_own_scorer(gym):
    task = envs.reasoning_gym("spell_backward", train_rows=5, held_out=2)
    row = task.test[0]
    assert not row.answer.isdigit()
    entry = {"question": row.prompt, "answer": row.answer, "metadata": row.info}
    generator = gym.create_dataset("spell_backward", seed=0, size=7)
    expected = [generator.score_answer(a, entry) for a in (row.answer, row.answer[:2], "")]
    found = task.reward([f"{row.answer}\nand more", row.answer[:2], ""], [row] * 3)
    assert found == expected
    assert found[0] == 1.0
    upper = envs.reasoning_gym("spell_backward", train_rows=5, held_out=2, extract=lambda t: t[1:])
    assert upper.reward(["!" + row.answer], [row]) == [1.0]


def test_an_unknown_name_or_setting_of_reasoning_gym_is_explained(gym):
    with pytest.raises(ValueError, match="no task 'chain_sums'; did you mean chain_sum"):
        envs.reasoning_gym("chain_sums")
    with pytest.raises(ValueError, match=r"no setting \['digits'\].*max_digits"):
        envs.reasoning_gym("chain_sum", digits=2)
