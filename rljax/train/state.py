"""Records of training: the state a step updates, and the token rows it reads."""

from __future__ import annotations

from typing import Any

from rljax.types import Array, Record


class Sequences(Record):
    """Token rows: one prompt and G responses to it, all right-padded.

    Attributes:
      prompt: [R, P] int32. prompt_length: [R] int32, at least 1.
      response: [R, G, T] int32. The responses of a row share the computation of its prompt.
    """

    prompt: Array
    prompt_length: Array
    response: Array


class TrainState(Record):
    """All that a training step changes.

    Attributes:
      params: float32 parameters (`models.spec.specs`).
      opt_state: optax state. loss_state: state of the loss chain.
      step: int32 scalar, updates done so far.
    """

    params: Any
    opt_state: Any
    loss_state: Any
    step: Array
