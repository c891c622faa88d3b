"""What every recipe does around its loop: make the policy, checkpoint, resume, stop on NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from rljax import policy as policies
from rljax import trees
from rljax.checkpoint import Checkpoints
from rljax.models import layers
from rljax.sharding import rules
from rljax.train.state import TrainState


def round_up(n: int, multiple: int = 8) -> int:
    """Smallest multiple that is at least n; shapes rounded so compile once for many lengths."""
    return -(-n // multiple) * multiple


def make_policy(
    model: str | Callable[[], policies.Policy],
    layout: rules.Layout,
    decode: policies.DecodeConfig,
    precision: layers.Precision,
) -> policies.Policy:
    """Loads a model by name, or calls the function that makes one and moves it to the layout."""
    if isinstance(model, str):
        return policies.load(model, layout=layout, decode=decode, precision=precision)
    made = model()
    params = made.params
    if made.layout != layout:
        from rljax.models import spec

        params = jax.device_put(jax.device_get(params), layout.tree(spec.specs(made.cfg)))
    return policies.Policy(
        made.cfg, params, made.tokenizer, layout=layout, decode=decode, precision=precision
    )


def check_room(policy: policies.Policy, prompt_tokens: int, uid: int, max_tokens: int) -> None:
    """Raises ValueError where prompt and completion of a row pass the model's positions."""
    room = policy.cfg.max_positions
    if prompt_tokens + max_tokens > room:
        raise ValueError(
            f"the prompt of row {uid} has {prompt_tokens} tokens; with max_tokens={max_tokens} "
            f"that is past the model's {room} positions; lower max_tokens or drop such rows"
        )


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Stops a run whose loss or gradient is not a number, naming step and metric."""
    for name in ("loss", "grad_norm", "value/loss", "value/grad_norm"):
        if not math.isfinite(values.get(name, 0.0)):
            raise FloatingPointError(
                f"step {step}: {name} is {values[name]}; resume from the last checkpoint with a "
                "lower learning rate, a smaller clip_norm, or float32 products"
            )


class Saver:
    """Checkpoints of a run, every `every` steps and at the last one; checks the space first.

    Args:
      state: what will be saved, where it is more than the policy's parameters and their moments.
    """

    def __init__(
        self, workdir: Path, policy: policies.Policy, every: int, last: int, state: Any = None
    ) -> None:
        self.every, self.last = every, last
        self.checkpoints = Checkpoints(workdir / policies.CHECKPOINTS)
        size = 3 * trees.size_bytes(policy.params) if state is None else trees.size_bytes(state)
        self.checkpoints.check_space(size)
        policies.write_description(policy, workdir)

    def maybe_save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Saves the state after `step` updates where one is due."""
        if step == self.last or (self.every and step % self.every == 0):
            self.checkpoints.save(step, state, meta)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The last complete checkpoint and its meta data.

        Raises:
          FileNotFoundError: if there is none.
        """
        step = self.checkpoints.latest()
        if step is None:
            raise FileNotFoundError(
                f"{self.checkpoints.folder} holds no complete checkpoint; start the run again with "
                "`rljax train` and a new --workdir"
            )

        def shape(x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        state = self.checkpoints.restore(step, jax.tree.map(shape, like))
        return state, self.checkpoints.meta(step)
