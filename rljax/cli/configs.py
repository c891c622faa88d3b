"""Config files, and the options that change their fields from the shell.

A config is a Python file that defines `config`, an instance of a recipe's Config. Code (the loss,
the task, the reward) is set there; numbers and names also from the shell.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import linecache
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

SOURCE, OVERRIDES = "config.py", "overrides.json"  # in a run directory

EXECUTED: set[str] = set()  # names of the files that were run as configs


def read_source(path: Path) -> str:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "give a Python file"
        raise FileNotFoundError(f"there is no config file {path}; {hint}")
    return path.read_text(encoding="utf-8")


def load_config(text: str, path: Path) -> Any:
    """Runs the text of a config file, as if it lay at `path`, and returns its `config`.

    Modules beside the file can be imported from it.

    Raises:
      ValueError: if it defines no config of a recipe.
    """
    name = str(path)
    EXECUTED.add(name)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType("rljax_config")  # registered, as dataclasses look their module up
    module.__file__ = name
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.resolve().parent))
    exec(compile(text, name, "exec"), module.__dict__)
    config = getattr(module, "config", None)
    if not dataclasses.is_dataclass(config) or isinstance(config, type) or not recipe(config):
        found = "no `config`" if config is None else f"a config of type {type(config).__name__}"
        raise ValueError(
            f"{path} defines {found}; a config file ends with, for instance, "
            "`config = grpo.Config(model=..., task=...)` (from rljax.recipes import grpo)"
        )
    return config


def recipe(config: Any) -> Callable[..., Any] | None:
    """The function `run` of the module that defines the class of `config`."""
    return getattr(sys.modules.get(type(config).__module__), "run", None)


# What a run directory keeps of them


def write_overrides(workdir: Path, path: Path, options: list[str]) -> None:
    record = {"config": str(path), "overrides": options}
    (workdir / OVERRIDES).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def stored(workdir: Path, more: list[str], prog: str) -> tuple[Any, Path, list[str]]:
    """The config of a run with its options and `more`, the file's first path, and all options."""
    if not (workdir / OVERRIDES).is_file() or not (workdir / SOURCE).is_file():
        raise FileNotFoundError(
            f"{workdir} is not the directory of a run that `rljax train` started (it has no "
            f"{SOURCE} with {OVERRIDES}); give the --workdir of the run"
        )
    record = json.loads((workdir / OVERRIDES).read_text(encoding="utf-8"))
    path, options = Path(record["config"]), [*record["overrides"], *more]
    config = load_config((workdir / SOURCE).read_text(encoding="utf-8"), path)
    return override(config, options, prog)[0], path, options


# Options


def override(config: Any, args: list[str], prog: str, **own: Any) -> tuple[Any, Any]:
    """Returns `config` changed by options such as `--mesh.fsdp 8`, and all options by attribute.

    Fields that hold code, or dataclasses with code inside, are no options.

    Args:
      own: further options, name=(type, default, help).
    """
    leaves = {**dict(_leaves(config)), **{name: _Leaf(*leaf) for name, leaf in own.items()}}
    fields = [
        (
            name.replace(".", "__"),
            Annotated[leaf.hint, tyro.conf.arg(name=name, help=leaf.help)],
            dataclasses.field(default=leaf.value),
        )
        for name, leaf in leaves.items()
    ]
    shape = dataclasses.make_dataclass("Options", fields, frozen=True)
    about = f"What can be set here of {type(config).__module__}.{type(config).__qualname__}."
    given = tyro.cli(shape, args=args, prog=prog, description=about)
    for name in leaves.keys() - own.keys():
        value = getattr(given, name.replace(".", "__"))
        if value != leaves[name].value:
            config = _replaced(config, name.split("."), value)
    return config, given


@dataclasses.dataclass(frozen=True)
class _Leaf:
    hint: Any
    value: Any
    help: str


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, _Leaf]]:
    """Yields the fields that a shell can write, those of nested dataclasses by dotted name."""
    hints, texts = typing.get_type_hints(type(config)), _attributes(type(config))
    for field in dataclasses.fields(config):
        name, value, hint = field.name, getattr(config, field.name), hints[field.name]
        inner = _dataclass_of(hint)
        if inner is not None:
            value = _default(inner) if value is None else value
            if dataclasses.is_dataclass(value) and _all_simple(type(value)):
                yield from _leaves(value, f"{prefix}{name}.")
        elif _simple_part(hint) is not None and _is_plain(value):
            yield prefix + name, _Leaf(_simple_part(hint), value, texts.get(name, ""))


def _default(cls: Any) -> Any:
    """What stands for an absent dataclass while one field of it is set, None if nothing can."""
    required = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    optional = all(f.default is not required or f.default_factory is not required for f in fields)
    return cls() if optional else None


def _all_simple(cls: Any) -> bool:
    hints = typing.get_type_hints(cls)
    return all(
        _simple_part(h) == h or (_dataclass_of(h) is not None and _all_simple(_dataclass_of(h)))
        for h in (hints[f.name] for f in dataclasses.fields(cls))
    )


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _dataclass_of(hint: Any) -> Any:
    """X of X or X | None, if it is a dataclass; else None."""
    members = [m for m in _members(hint) if m is not types.NoneType]
    alone = members[0] if len(members) == 1 else None
    return alone if isinstance(alone, type) and dataclasses.is_dataclass(alone) else None


def _simple_part(hint: Any) -> Any:
    """The part of a type that a shell can write (str of `str | Callable`), None if none."""
    kept = [m for m in _members(hint) if _is_simple(m)]
    if not kept or kept == [types.NoneType]:
        return None
    return functools.reduce(lambda a, b: a | b, kept) if len(kept) > 1 else kept[0]


def _is_simple(hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        return all(_is_simple(a) for a in typing.get_args(hint) if a is not Ellipsis)
    simple = (bool, int, float, str, Path, types.NoneType)
    return hint in simple or typing.get_origin(hint) is Literal


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Path)


def _replaced(config: Any, names: list[str], value: Any) -> Any:
    name, *rest = names
    if rest:
        inner = getattr(config, name)
        if inner is None:
            inner = _default(_dataclass_of(typing.get_type_hints(type(config))[name]))
        value = _replaced(inner, rest, value)
    return dataclasses.replace(config, **{name: value})


def without(args: list[str], option: str) -> list[str]:
    """Drops `--option value` and `--option=value`."""
    kept, skip = [], False
    for arg in args:
        if skip:
            skip = False
        elif arg == f"--{option}":
            skip = True
        elif not arg.startswith(f"--{option}="):
            kept.append(arg)
    return kept


def _attributes(cls: type) -> dict[str, str]:
    """Texts of `name: text` entries; an entry starts a line or follows a full stop."""
    text = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
    names = "|".join(f.name for f in dataclasses.fields(cls))
    parts = re.split(rf"(?:^|\n|(?<=\.) )\s*({names}): ", text)
    return {k: " ".join(v.split()) for k, v in zip(parts[1::2], parts[2::2])}
