"""The critic: a value head on a decoder of its own or on the policy's, its scoring and its step.

The value of response token t is read where its log-prob is, from the hidden state of the token
before it, so values and log-probs share every index. A critic may read another prompt than the
policy did (a privileged one): the response columns stay the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from rljax import trees
from rljax.losses import base, value
from rljax.models import decoder, spec
from rljax.sharding import rules
from rljax.train import step as steps
from rljax.train.state import Sequences, TrainState
from rljax.types import Array, Metric

Params = spec.Params
VALUE = ("value", "value_bias")  # the head's parameters


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """What a critic is.

    Attributes:
      backbone: "separate" starts as a copy of the policy and learns as a whole; "shared" reads the
        policy's hidden states and learns the head alone.
      bounds: lowest and highest return; the value cannot leave them (`losses.bounded`). None for
        returns without bounds, where the head is linear.
    """

    backbone: Literal["separate", "shared"] = "separate"
    bounds: tuple[float, float] | None = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(
                f"bounds={self.bounds} of the critic; give the lowest and the highest return, "
                "for instance (0.0, 1.0), or None"
            )


def specs(cfg: spec.ModelConfig, backbone: Literal["separate", "shared"] = "separate") -> Any:
    """What the critic learns: the head, [D] and a bias, which start at 0, and its own decoder."""
    head = {
        "value": spec.Param((cfg.width,), (None,), 0.0),
        "value_bias": spec.Param((), (), 0.0),
    }
    own = spec.specs(cfg) if backbone == "separate" else {}
    return {**{name: p for name, p in own.items() if name != "head"}, **head}


def init(
    policy: Params, cfg: spec.ModelConfig, backbone: Literal["separate", "shared"] = "separate"
) -> Params:
    """Parameters of `specs`: the decoder is the policy's, every value the middle of the bounds."""
    head = {"value": jnp.zeros(cfg.width), "value_bias": jnp.zeros(())}
    return {name: head[name] if name in head else policy[name] for name in specs(cfg, backbone)}


def whole(params: Params, policy: Params, cfg: spec.ModelConfig) -> Params:
    """The parameters that `make_value_score` takes: what the critic lacks is the policy's."""
    return {name: params[name] if name in params else policy[name] for name in specs(cfg)}


def _values(
    tree: Any,
    cfg: spec.ModelConfig,
    critic: CriticConfig,
    step: steps.StepConfig,
    layout: rules.Layout,
    rows: Sequences,
) -> Array:
    x = decoder.grouped_hidden(
        tree, cfg, rows.prompt, rows.prompt_length, rows.response,
        precision=step.precision, remat=step.remat, layout=layout,
    )  # fmt: skip
    if critic.backbone == "shared":
        x = lax.stop_gradient(x)
    raw = jnp.sum(x.astype(jnp.float32) * tree["value"], -1) + tree["value_bias"]
    raw = raw.reshape(-1, raw.shape[-1])
    return raw if critic.bounds is None else value.bounded(raw, *critic.bounds)


def make_value_score(
    cfg: spec.ModelConfig, critic: CriticConfig, step: steps.StepConfig, layout: rules.Layout
) -> Callable[[Params, Sequences], Array]:
    """Returns jitted score(params, sequences) -> [B, T] float32, the value before each token.

    The parameters are those of `whole`; entries of padding are meaningless.
    """

    def score(params: Params, sequences: Sequences) -> Array:
        tree = steps.expand(params, cfg, step, layout)
        return steps.over_rows(
            lambda rows: _values(tree, cfg, critic, step, layout, rows),
            sequences, step.microbatches, layout,
        )  # fmt: skip

    rows = layout.sharding(("batch",))
    params = layout.tree(specs(cfg))
    return jax.jit(score, in_shardings=(params, rows), out_shardings=rows)


def make_critic_step(
    cfg: spec.ModelConfig,
    critic: CriticConfig,
    loss: base.LossTransform,
    optimiser: optax.GradientTransformation,
    step: steps.StepConfig,
    layout: rules.Layout,
) -> Callable[..., tuple[TrainState, dict[str, Metric]]]:
    """Returns jitted update(state, policy, sequences, batch) -> (state, metrics), state donated.

    `policy` holds the policy's parameters under a shared backbone, and is {} otherwise. The batch
    needs mask, value_target and whatever else the loss reads. Metrics are those that the loss names
    value/..., and value/grad_norm.
    """

    def update(
        state: TrainState, policy: Params, sequences: Sequences, batch: base.Batch
    ) -> tuple[TrainState, dict[str, Metric]]:
        steps.check_rows(sequences.prompt.shape[0], step.microbatches, layout)
        batch = batch.replace(advantage=jnp.zeros_like(batch.mask))  # no policy term
        batch, loss_state = loss.prepare(batch, state.loss_state)

        def grow(params: Params) -> Any:
            return steps.expand(whole(params, policy, cfg), cfg, step, layout)

        tree, pull = jax.vjp(grow, state.params)

        def total(tree: Any, rows: Sequences, part: base.Batch) -> Any:
            live = _values(tree, cfg, critic, step, layout, rows)
            nothing = jnp.zeros_like(part.mask)
            out, metrics = loss(nothing, part, loss_state, value_live=live)
            return out, ({k: m for k, m in metrics.items() if k.startswith("value/")}, {})

        grad = jax.grad(total, has_aux=True)
        grads, (metrics, _) = steps.accumulate(grad, tree, sequences, batch, step.microbatches)
        (grads,) = pull(grads)
        norm = Metric(sum=trees.global_norm(grads), weight=jnp.float32(1.0))
        new = steps.apply(optimiser, state, grads, loss_state)
        return new, {**metrics, "value/grad_norm": norm}

    own = steps.state_shardings(specs(cfg, critic.backbone), optimiser, layout)
    shared = layout.tree(spec.specs(cfg)) if critic.backbone == "shared" else {}
    rows = layout.sharding(("batch",))
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(own, shared, rows, rows),
        out_shardings=(own, layout.replicated),
    )


def explained_variance(values: Array, targets: Array, mask: Array) -> Array:
    """1 - Var(target - value) / Var(target) over the trained tokens; NaN if all targets equal."""
    count = jnp.maximum(jnp.sum(mask), 1.0)

    def variance(x: Array) -> Array:
        mean = jnp.sum(jnp.where(mask > 0, x, 0.0)) / count
        return jnp.sum(jnp.where(mask > 0, (x - mean) ** 2, 0.0)) / count

    return 1.0 - variance(targets - values) / variance(targets)
