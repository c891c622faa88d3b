"""The command line: overrides, run directories, exit statuses, and no traceback for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pytest

from rljax import cli
from rljax.cli import configs, verdict

RECIPE = '''
"""A recipe that computes nothing: it writes down what it was given."""
import dataclasses, json
from collections.abc import Callable
from typing import Any, Literal
from rljax.sharding.mesh import MeshConfig
from rljax.train.optimiser import OptimiserConfig

@dataclasses.dataclass(frozen=True)
class Decode:
    """How to sample.

    Attributes:
      slots: sequences side by side.
    """
    slots: int | None = None
    mesh: MeshConfig | None = None

@dataclasses.dataclass(frozen=True)
class Loss:
    update: Callable[[float], float]
    clip: float = 0.2

@dataclasses.dataclass(frozen=True)
class Adapter:
    rank: int

@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
      model: a name, or a function that makes one.
      prompts: prompts per step. group: completions
        per prompt.
    """
    loss: Loss
    model: str | Callable[[], Any] = "tiny"
    task: Any = None
    steps: int = 50
    prompts: int = 8
    group: int = 4
    sizes: tuple[int, ...] = (1, 2)
    remat: Literal["none", "block"] = "none"
    optimiser: OptimiserConfig = OptimiserConfig()
    mesh: MeshConfig = MeshConfig()
    decode: Decode = Decode()
    adapter: Adapter | None = None  # cannot be made without a rank
    regulariser: Loss | None = None
    tensorboard: bool = False
    fail: str = ""

def run(config, workdir, resume=False):
    rest = dataclasses.asdict(dataclasses.replace(config, loss=None, task=None))
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"resume": resume, "told": config.loss.update(1.0), **rest}) + "\\n")
    from rljax import checkpoint, rewards
    match config.fail:
        case "nan":
            from rljax.recipes import workdir as runs
            runs.check_finite(3, {"loss": float("nan")})
        case "rows":
            OptimiserConfig(lr=-1.0)
        case "disk":
            raise checkpoint.CheckpointError("the disk is full; free some")
        case "reward":
            rewards.call_reward(lambda texts, examples: [], ["a"], [None])
        case "bug":
            [][1]
        case "stop":
            raise KeyboardInterrupt
'''
CONFIG = """
import fake_recipe

def twice(x):
    return 2 * x

config = fake_recipe.Config(loss=fake_recipe.Loss(update=twice), steps=30)
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A directory with a recipe and a config, in which the command runs."""
    (tmp_path / "fake_recipe.py").write_text(RECIPE)
    (tmp_path / "small.py").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "fake_recipe", raising=False)
    return tmp_path


def rows(workdir: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]


def flat(text: str) -> str:
    """Text without the boxes and line breaks that the option parser draws."""
    return " ".join("".join(" " if c in "│╭╮╰╯─" else c for c in text).split())


def test_options_reach_the_config_with_their_types(project):
    status = cli.main(
        [
            *("train", "small.py", "--workdir", "out", "--mesh.fsdp", "-1", "--mesh.tensor", "2"),
            *("--optimiser.lr", "1e-5", "--optimiser.warmup_steps", "3", "--remat", "block"),
            *("--decode.mesh.data", "8", "--sizes", "4", "5", "--tensorboard", "--model", "big"),
        ]
    )
    assert status == 0
    (row,) = rows("out")
    assert row["mesh"] == {"data": 1, "fsdp": -1, "tensor": 2}
    assert row["optimiser"]["lr"] == 1e-5 and row["optimiser"]["warmup_steps"] == 3
    assert row["decode"] == {"slots": None, "mesh": {"data": 8, "fsdp": -1, "tensor": 1}}
    assert row["sizes"] == [4, 5] and row["remat"] == "block" and row["tensorboard"] is True
    assert row["model"] == "big" and row["steps"] == 30 and row["resume"] is False
    assert row["told"] == 2.0  # the code of the config travelled along


def test_without_options_nothing_changes(project):
    assert cli.main(["train", "small.py", "--workdir", "out"]) == 0
    assert rows("out")[0]["decode"] == {"slots": None, "mesh": None}


def test_code_is_no_option(project, capsys):
    assert cli.main(["train", "small.py", "--help"]) == 0
    text = flat(capsys.readouterr().out)
    assert "--mesh.fsdp INT" in text and "--decode.mesh.tensor INT" in text
    assert "--group INT completions per prompt." in text  # from the class's docstring
    assert "--decode.slots {None}|INT sequences side by side." in text
    assert "--loss" not in text and "--task" not in text and "clip " not in text
    assert "--adapter" not in text and "--regulariser" not in text


@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("--stepz", "--steps INT"),
        ("--optimizer.lr", "--optimiser.lr FLOAT"),
        ("--mesh.fdsp", "--mesh.fsdp INT"),
        ("--workdri", "--workdir"),
    ],
)
def test_a_misspelt_option_suggests_the_nearest(project, capsys, typo, near):
    assert cli.main(["train", "small.py", typo, "3"]) == 2
    text = flat(capsys.readouterr().err)
    assert f"Unrecognized options: {typo}" in text and f"Perhaps you meant: {near}" in text
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--steps", "many"], "--steps"),
        (["--remat", "all"], "Expected one of"),
        (["--optimiser.lr", "-1"], "error: learning rate -1.0 must be positive"),
        (["--workdir", "gs://bucket/a"], "error: --workdir gs://bucket/a is a URL"),
    ],
)
def test_a_wrong_value_is_refused_before_the_run(project, capsys, options, fact):
    assert cli.main(["train", "small.py", *options]) == 2
    text = flat(capsys.readouterr().err)
    assert fact in text and "Traceback" not in text
    assert not (project / "runs").exists()


def test_the_default_directories_are_numbered(project):
    for _ in range(2):
        assert cli.main(["train", "small.py"]) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["small-1", "small-2"]


def test_a_directory_that_holds_a_run_is_refused(project, capsys):
    assert cli.main(["train", "small.py", "--workdir", "out"]) == 0
    assert cli.main(["train", "small.py", "--workdir", "out"]) == 2
    assert "rljax resume out" in capsys.readouterr().err
    assert len(rows("out")) == 1


def test_resume_uses_the_copy_and_the_options_of_the_start(project):
    cli.main(["train", "small.py", "--steps", "7", "--workdir=out", "--mesh.fsdp", "4"])
    (project / "small.py").write_text("the file has changed since")
    assert (project / "out/config.py").read_text() == CONFIG

    assert cli.main(["resume", "out"]) == 0
    assert cli.main(["resume", "out", "--mesh.fsdp", "2"]) == 0
    assert cli.main(["resume", "out"]) == 0

    assert [(r["resume"], r["steps"], r["mesh"]["fsdp"]) for r in rows("out")] == [
        (False, 7, 4),
        (True, 7, 4),
        (True, 7, 2),
        (True, 7, 2),
    ]


def test_resume_of_something_else_is_refused(project, capsys):
    assert cli.main(["resume", "nowhere"]) == 2
    assert "not the directory of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("config = 3", "small.py defines a config of type int; a config file ends with"),
        ("x = 1", "small.py defines no `config`"),
        ("config = (", "small.py, line 1: '(' was never closed"),
        ("import fake_recipe\nconfig = nothing", "small.py, line 2: NameError"),
        ("import not_installed", "small.py, line 1: ModuleNotFoundError"),
        (
            "from rljax.train.optimiser import OptimiserConfig\n\nOptimiserConfig(warm_steps=3)",
            "small.py, line 3: OptimiserConfig has no field 'warm_steps'; did you mean 'warmup",
        ),
        (
            "from rljax import envs\nenvs.arithmetic(digitz=3)",
            "small.py, line 2: arithmetic has no field 'digitz'; did you mean 'digits'?",
        ),
        (
            "from rljax import envs\nenvs.arithmetic(digits=1, held_out=200)",
            "small.py, line 2: held_out=200 leaves none",
        ),
        (
            "from rljax import envs\nenvs.jsonl('rows.jsonl')",
            "rows.jsonl is not a file",
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_the_config_names_its_line(project, capsys, text, fact):
    (project / "small.py").write_text(text)
    assert cli.main(["train", "small.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert fact in err
    assert not (project / "runs").exists()


def test_a_missing_config_suggests_a_near_one(project, capsys):
    assert cli.main(["train", "smal.py"]) == 2
    assert "did you mean small.py?" in capsys.readouterr().err
    assert cli.main(["train", "--steps", "3", "small.py"]) == 2
    assert "name the file or directory before --steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fail", "status", "fact"),
    [
        ("nan", 1, "error: step 3: loss is nan; resume"),
        ("rows", 2, "error: learning rate -1.0"),
        ("disk", 1, "error: the disk is full; free some"),
        ("reward", 1, "returned 0 values for 1 completions"),
    ],
)
def test_a_run_that_fails_says_why(project, capsys, fail, status, fact):
    assert cli.main(["train", "small.py", "--fail", fail]) == status
    err = capsys.readouterr().err
    assert fact in err and "Traceback" not in err


def test_a_traceback_is_shown_when_asked_for(project, capsys, monkeypatch):
    monkeypatch.setenv("RLJAX_DEBUG", "1")
    assert cli.main(["train", "small.py", "--fail", "rows"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(project):
    with pytest.raises(IndexError):
        cli.main(["train", "small.py", "--fail", "bug"])


def test_a_value_error_from_outside_the_package_is_a_bug():
    try:
        json.loads("{")
    except ValueError as error:
        assert verdict.of(error) == ("", 0)


def test_an_interrupt_says_how_to_go_on(project, capsys):
    assert cli.main(["train", "small.py", "--workdir", "out", "--fail", "stop"]) == 130
    assert "rljax resume out" in capsys.readouterr().err


def test_a_config_has_the_file_it_was_written_in(project):
    (project / "small.py").write_text(CONFIG + "\nimport pathlib\nassert __file__ == 'small.py'\n")
    assert cli.main(["train", "small.py", "--workdir", "out"]) == 0
    (project / "out/config.py").write_text(
        CONFIG + f"\nassert __file__ == {str(project / 'small.py')!r}\n"
    )
    assert cli.main(["resume", "out"]) == 0  # data beside the first file is found again


# Commands that load a model, with a model that is not there


class FakePolicy:
    def __init__(self, name: str) -> None:
        self.name = name

    def sample(self, prompt, *, n, seed, max_tokens, temperature):
        return [f"{self.name} {prompt} {seed} {max_tokens} {temperature} {i}" for i in range(n)]

    def save(self, folder, dtype):
        Path(folder).mkdir()
        (Path(folder) / "config.json").write_text(str(dtype))


@pytest.fixture
def fake_models(monkeypatch):
    def load(name: str) -> FakePolicy:
        if name == "missing":
            raise FileNotFoundError("there is no model at missing; give a folder")
        return FakePolicy(name)

    calls = []

    def evaluate(policy, task, **settings):
        calls.append((policy.name, task, settings))
        nan = float("nan")
        return {"sampled": 0.25, "greedy": nan, "count": 3, "texts": []}

    # set by hand: the real modules load the whole package
    fakes = {"policy": types.SimpleNamespace(load=load)}
    recipe = types.SimpleNamespace(evaluate=evaluate)
    import rljax.recipes

    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, f"rljax.{name}", module)
        monkeypatch.setattr(f"rljax.{name}", module, raising=False)
    monkeypatch.setitem(sys.modules, "rljax.recipes.evaluate", recipe)
    monkeypatch.setattr(rljax.recipes, "evaluate", recipe, raising=False)
    return calls


def test_sample_prints_the_texts(fake_models, capsys):
    assert cli.main(["sample", "m", "Hi", "--seed", "3", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "m Hi 3 9 1.0 0\n"
    assert cli.main(["sample", "m", "Hi", "--n", "2", "--temperature", "0"]) == 0
    expected = "--- 1\nm Hi None 128 0.0 0\n--- 2\nm Hi None 128 0.0 1\n"
    assert capsys.readouterr().out == expected
    assert cli.main(["sample", "m", "Hi", "--n", "0"]) == 2
    assert cli.main(["sample", "missing", "Hi"]) == 2
    assert "there is no model at missing" in capsys.readouterr().err


def test_export_writes_a_folder_once(fake_models, project, capsys):
    assert cli.main(["export", "m", "--to", "out", "--dtype", "bfloat16"]) == 0
    assert Path("out/config.json").read_text() == "bfloat16"
    assert cli.main(["export", "m", "--to", "out"]) == 2
    assert "another folder" in capsys.readouterr().err


def test_eval_takes_a_task_by_name(fake_models, capsys):
    words = ["arithmetic", "digits=1", "held_out=10", "operations=+-"]
    assert cli.main(["eval", "m", *words, "--samples", "4", "--seed", "2"]) == 0
    ((name, task, settings),) = fake_models
    assert name == "m" and task.name == "arithmetic_1" and len(task.test) == 10
    assert {e.prompt.split()[3] for e in task.train} == {"+", "-"}
    assert settings["samples"] == 4 and settings["seed"] == 2 and settings["split"] == "test"
    printed = json.loads(capsys.readouterr().out)
    assert printed["sampled"] == 0.25 and printed["greedy"] is None  # NaN is no JSON


def test_eval_takes_the_task_of_a_config_or_of_a_run(fake_models, project):
    task = "from rljax import envs\n"
    config = CONFIG.replace("steps=30", "steps=30, task=envs.arithmetic")
    (project / "small.py").write_text(task + config)
    assert cli.main(["eval", "m", "small.py"]) == 0
    assert cli.main(["train", "small.py", "--workdir", "out"]) == 0
    assert cli.main(["eval", "out"]) == 0
    assert [(name, task.name) for name, task, _ in fake_models] == [
        ("m", "arithmetic_1"),
        ("out", "arithmetic_1"),
    ]


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ([], "name a task after it"),
        (["arithmetics"], "did you mean 'arithmetic'?"),
        (["arithmetic", "digitz=2"], "arithmetic has no field 'digitz'; did you mean 'digits'?"),
        (["gsm8k"], "gsm8k takes either path="),
        (["jsonl", "no.jsonl"], "no.jsonl is not a file"),
        (["small.py", "digits=2"], "settings of a task stand in its file"),
        (["small.py"], "the config of small.py has no task"),
    ],
)
def test_a_wrong_task_is_explained(fake_models, project, capsys, words, fact):
    assert cli.main(["eval", "m", *words]) == 2
    err = capsys.readouterr().err
    assert fact in err and "Traceback" not in err


# The door


def test_help_is_short_and_quick():
    code = """
        import sys
        from rljax import cli
        for command in ("", "train", "resume", "eval", "sample", "export"):
            assert cli.main([*filter(None, [command]), "--help"]) == 0
        assert "jax" not in sys.modules and "numpy" not in sys.modules
    """
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - begin < 10  # importing jax twice over would take longer
    for command in cli.COMMANDS:
        assert f"rljax {command}" in done.stdout
    assert "sample runs/a" in done.stdout  # each help has an example


def test_an_unknown_command_suggests_one(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == (
        "error: there is no command 'trian'; did you mean `rljax train`?\n"
    )
    assert cli.main([]) == 2 and cli.main(["--help"]) == 0
    assert cli.main(["--version"]) == 0


def test_the_directory_is_not_kept_among_the_options():
    args = ["--steps", "3", "--workdir", "a", "--workdir=b", "--seed", "1"]
    assert configs.without(args, "workdir") == ["--steps", "3", "--seed", "1"]
