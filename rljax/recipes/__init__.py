"""Whole runs: each recipe is a Config and a `run`; they load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljax.recipes import evaluate, grpo, sft

__all__ = ["evaluate", "grpo", "sft"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in __all__:
        return importlib.import_module(f"rljax.recipes.{name}")
    raise AttributeError(f"rljax.recipes has no {name!r}; it has {', '.join(__all__)}")
