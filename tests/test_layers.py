"""Imports point down: which package may import which, and what each may take from outside.

The rules are the table below; a new package gets its row the day it is added.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rljax"

GROUND = {"types", "trees", "rng"}
WORLD = {"rewards", "data", "envs"}
FLOOR_2 = {"sharding", "kernels", "models"}
RECORDS = {"metrics", "progress", "provenance", "report"}
FLOOR_3 = {"train", "pipeline", "decode", "plan", "checkpoint"} | RECORDS | WORLD
FLOOR_4 = {"rollout", "policy", "graph"}
BELOW_ROOF = {"losses", "flows", "offline"} | FLOOR_2 | FLOOR_3 | FLOOR_4


class Rule(NamedTuple):
    """What the modules of a package may import.

    Attributes:
      inside: packages of rljax, at any place in the file; the ground and the package itself always.
      top: packages from outside, anywhere.
      lazy: packages from outside, inside functions only (optional or slow to import).
    """

    inside: set[str]
    top: set[str]
    lazy: frozenset[str] | set[str] = frozenset()


ARRAYS = {"jax", "numpy"}
RULES = {
    # ground
    "types": Rule(set(), ARRAYS),
    "trees": Rule(set(), ARRAYS),
    "rng": Rule(set(), ARRAYS),
    # floor 1: mathematics
    "losses": Rule(set(), {"jax"}),
    "flows": Rule({"losses"}, {"jax", "optax"}),
    "offline": Rule({"losses"}, {"jax", "optax"}),
    # floor 2: the model and where it lives
    "sharding": Rule(set(), ARRAYS),
    "kernels": Rule(set(), ARRAYS),
    "models": Rule(
        {"sharding", "kernels"}, ARRAYS | {"ml_dtypes"}, {"safetensors", "gguf", "huggingface_hub"}
    ),
    # floor 3: machines
    "train": Rule({"losses", "models", "sharding"}, ARRAYS | {"optax"}),
    "pipeline": Rule({"models", "sharding", "train"}, ARRAYS),
    "decode": Rule({"models", "sharding", "kernels"}, ARRAYS, {"jetstream"}),
    "plan": Rule({"models", "sharding", "train", "decode"}, ARRAYS, {"libtpu"}),
    "checkpoint": Rule({"sharding"}, ARRAYS | {"orbax"}),
    "metrics": Rule({"sharding"}, ARRAYS, {"tensorboardX"}),
    "progress": Rule({"metrics"}, {"numpy"}, {"rich"}),
    "provenance": Rule({"metrics"}, {"jax"}),
    "report": Rule({"metrics", "provenance"}, set()),
    # floor 3: the world, which knows no model
    "rewards": Rule(set(), {"numpy"}, {"math_verify", "vader"}),
    "data": Rule(
        set(), {"numpy", "tokenizers", "jinja2"}, {"tensorflow_datasets", "grain", "array_record"}
    ),
    "envs": Rule(
        {"rewards", "data"},
        {"numpy"},
        {"tensorflow_datasets", "grain", "array_record", "reasoning_gym"},
    ),
    # floor 4: runs
    "rollout": Rule({"decode", "envs", "rewards", "data", "losses"}, ARRAYS),
    "policy": Rule({"models", "decode", "data", "sharding", "checkpoint"}, ARRAYS),
    "graph": Rule(
        {"train", "decode", "rollout", "sharding", "checkpoint", "plan"}, ARRAYS, {"ray"}
    ),
    # roof
    "recipes": Rule(BELOW_ROOF, ARRAYS | {"optax"}, {"rich"}),
    "cli": Rule(BELOW_ROOF | {"recipes"}, ARRAYS | {"tyro"}, {"rich"}),
    "testing": Rule(BELOW_ROOF | {"recipes", "cli"}, ARRAYS | {"chex"}),
}
# One file of a package that may take more than its package.
EXTRA_TOP = {"models/nets.py": {"flax"}}


class Import(NamedTuple):
    module: str  # absolute dotted name, down to the imported name for `from` imports
    line: int
    lazy: bool  # inside a function or under TYPE_CHECKING: not run when the module is imported


def imports(source: str, package: str) -> Iterator[Import]:
    """Yields every import of a module, nested ones and import_module("constant") included."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            constants = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            yield from (Import(str(name), node.lineno, lazy) for name in constants)
        checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy or function or checking)

    yield from walk(ast.parse(source), lazy=False)


def violations(path: str, source: str) -> list[str]:
    """Returns a sentence for each import of `rljax/<path>` that the table forbids."""
    parts = path.removesuffix(".py").split("/")
    owner = parts[0]
    if owner not in RULES:
        return [f"rljax/{path}: `{owner}` has no row in tests/test_layers.py; give it one"]
    rule = RULES[owner]
    inside = rule.inside | GROUND | {owner} if owner not in GROUND else GROUND
    top = rule.top | EXTRA_TOP.get(path, set())
    found = []
    for name, line, lazy in imports(source, ".".join(["rljax", *parts[:-1]])):
        outside, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        place = f"rljax/{path}:{line}: {owner} may not import"
        if outside != "rljax":
            allowed = top | rule.lazy if lazy else top
            if outside not in allowed and outside not in sys.stdlib_module_names:
                advice = "inside a function only" if outside in rule.lazy else "at all"
                found.append(f"{place} {outside} ({advice})")
        elif not target:
            found.append(f"{place} rljax as a whole; import the module it needs")
        elif target != "__version__" and target not in inside:
            found.append(f"{place} rljax.{target}")
    return found


FILES = sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", [f for f in FILES if f != "__init__.py"])
def test_imports_follow_the_table(path):
    assert violations(path, (PACKAGE / path).read_text()) == []


def test_the_package_itself_imports_nothing_when_loaded():
    eager = [i for i in imports((PACKAGE / "__init__.py").read_text(), "rljax") if not i.lazy]
    names = {i.module.partition(".")[0] for i in eager}
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("path", "source", "fact"),
    [  # each row breaks one rule on purpose; the wording names the file, the line and the target
        ("losses/ratio.py", "from rljax.models import spec", "losses/ratio.py:1"),
        ("losses/ratio.py", "def f():\n    from rljax import train", "losses/ratio.py:2"),
        ("losses/ratio.py", "from ..models import spec", "rljax.models"),
        ("losses/ratio.py", "import numpy", "numpy (at all)"),
        ("losses/ratio.py", "import rljax", "rljax as a whole"),
        ("types.py", "from rljax import losses", "rljax.losses"),
        ("models/hf.py", "import safetensors.numpy", "safetensors (inside a function only)"),
        ("models/decoder.py", "import flax.linen as nn", "flax (at all)"),
        ("envs/tools.py", "import jax", "jax (at all)"),
        ("rollout/sync.py", "from rljax.train import step", "rljax.train"),
        ("train/step.py", "import importlib\nimportlib.import_module('rljax.cli')", "rljax.cli"),
        ("policy.py", "from typing import *\nfrom rljax import testing", "rljax.testing"),
        ("novelty/x.py", "", "no row"),
    ],
)
def test_a_forbidden_import_is_found(path, source, fact):
    (message,) = violations(path, source)
    assert fact in message


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("losses/ratio.py", "import jax\nfrom rljax import types\nfrom rljax.losses import base"),
        (
            "losses/ratio.py",
            "from . import base\nfrom .base import chain\nfrom ..types import Record",
        ),
        ("models/nets.py", "import flax.linen as nn"),
        ("models/hf.py", "def read():\n    import safetensors.numpy"),
        ("metrics.py", "from rljax import __version__"),
    ],
)
def test_an_allowed_import_passes(path, source):
    assert violations(path, source) == []
