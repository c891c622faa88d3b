"""rljax: reinforcement learning for language models in JAX.

The names below load on first use, so `import rljax` costs nothing and `import rljax.losses` loads
jax alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljax import envs, losses, models, recipes, rewards, testing
    from rljax.policy import Policy, load

__version__ = "0.1.0"

__all__ = [
    "Policy",
    "__version__",
    "envs",
    "load",
    "losses",
    "models",
    "recipes",
    "rewards",
    "testing",
]

_FROM_POLICY = ("Policy", "load")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _FROM_POLICY:
        return getattr(importlib.import_module("rljax.policy"), name)
    if name in __all__:
        return importlib.import_module(f"rljax.{name}")
    raise AttributeError(f"module 'rljax' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
