"""The optimiser: optax AdamW behind a clip of the global norm, with a schedule."""

from __future__ import annotations

import dataclasses
from typing import Literal

import optax


@dataclasses.dataclass(frozen=True)
class OptimiserConfig:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with linear warm-up and decay.

    Attributes:
      lr: peak learning rate.
      schedule: after the warm-up constant, or to zero at the last step, linearly or by a cosine.
      warmup_steps: updates over which the rate rises from 0 to `lr`.
      clip_norm: largest global gradient norm; larger gradients are scaled down to it.
    """

    lr: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"learning rate {self.lr} must be positive")
        if self.clip_norm <= 0:
            raise ValueError(
                f"clip_norm {self.clip_norm} must be positive; use a large one for none"
            )


def make_schedule(cfg: OptimiserConfig, total_steps: int) -> optax.Schedule:
    """Learning rate as a function of the update count."""
    after = max(total_steps - cfg.warmup_steps, 1)
    main = {
        "constant": lambda: optax.constant_schedule(cfg.lr),
        "linear": lambda: optax.linear_schedule(cfg.lr, 0.0, after),
        "cosine": lambda: optax.cosine_decay_schedule(cfg.lr, after),
    }[cfg.schedule]()
    if not cfg.warmup_steps:
        return main
    rise = optax.linear_schedule(0.0, cfg.lr, cfg.warmup_steps)
    return optax.join_schedules([rise, main], [cfg.warmup_steps])


def make_optimiser(cfg: OptimiserConfig, total_steps: int) -> optax.GradientTransformation:
    """Clip of the global norm, then AdamW under the schedule; state in float32."""
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(
            make_schedule(cfg, total_steps), cfg.b1, cfg.b2, cfg.eps, weight_decay=cfg.weight_decay
        ),
    )
