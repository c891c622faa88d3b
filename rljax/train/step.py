"""The training step and scoring: one jitted pure function each, sharded by a layout.

The step prepares the loss on the full batch, sums float32 gradients over microbatches in a scan and
updates once. It knows no algorithm: what it computes follows from `loss.needs`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from rljax import trees
from rljax.losses import base
from rljax.models import decoder, heads, layers, spec
from rljax.sharding import rules
from rljax.train.state import Sequences, TrainState
from rljax.types import Array, Metric


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How a step is computed; none of it changes the result beyond rounding.

    Attributes:
      microbatches: parts the rows are cut into, one after the other.
      temperature: the sampler's; the trainer's logits are divided by it.
      on_policy: the batch was sampled by the parameters that the step starts from, so `logp_old`
        is the step's own log-prob, without gradient; otherwise the batch must hold it.
      remat: "block" recomputes each block in the backward pass.
    """

    microbatches: int = 1
    temperature: float = 1.0
    on_policy: bool = True
    remat: decoder.Remat = "none"
    precision: layers.Precision = layers.FLOAT32
    form: decoder.Form | None = None  # None picks by platform


def expand(params: Any, cfg: spec.ModelConfig, step: StepConfig, layout: rules.Layout) -> Any:
    fuse = layout.size("heads") == layout.size("mlp") == 1
    return decoder.expand(params, cfg, step.form or decoder.pick_form(), fuse)


def _cut(tree: Any, rows: int, parts: int) -> Any:
    """Splits leading axes [rows * k, ...] into [parts, rows / parts * k, ...], every parts-th row.

    Strided, so that each part holds rows of every device when rows are split over devices.
    """

    def one(x: Array) -> Array:
        k = x.shape[0] // rows
        x = x.reshape(rows // parts, parts, k, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(parts, rows // parts * k, *x.shape[3:])

    return jax.tree.map(one, tree)


def check_rows(rows: int, microbatches: int, layout: rules.Layout) -> None:
    """Raises ValueError unless `rows` divide into microbatches and those over the devices."""
    shards = layout.size("batch")
    if rows % (microbatches * shards):
        best = math.gcd(rows // math.gcd(rows, shards), microbatches)
        raise ValueError(
            f"{rows} rows do not divide into {microbatches} microbatches over {shards} devices; "
            f"use a multiple of {microbatches * shards} rows, or microbatches={best}"
            + (f" and a batch axis of {math.gcd(rows, shards)} devices" if rows % shards else "")
        )


FULL = frozenset({"full_kl", "full_tv", "full_kl_dot", "full_tv_dot"})


def _head(
    tree: Any,
    cfg: spec.ModelConfig,
    step: StepConfig,
    layout: rules.Layout,
    rows: Sequences,
    needs: frozenset[str] = frozenset(),
    topk_ids: Array | None = None,
    anchor: Any = None,
) -> dict[str, Array]:
    """Log-prob and entropy [B, T] of the response tokens, B = R * G, and what `needs` names."""

    def hidden(tree: Any, remat: decoder.Remat = "none") -> Array:
        return decoder.grouped_hidden(
            tree, cfg, rows.prompt, rows.prompt_length, rows.response,
            precision=step.precision, remat=remat, layout=layout,
        )  # fmt: skip

    settings: Any = {"temperature": step.temperature, "precision": step.precision, "layout": layout}
    if "topk_logp_live" not in needs:
        topk_ids = None
    elif topk_ids is not None:
        topk_ids = topk_ids.reshape(*rows.response.shape, topk_ids.shape[-1])
    x = hidden(tree, step.remat)
    out = heads.token_statistics(
        tree, cfg, x, rows.response, entropy_gradient="entropy" in needs,
        sum_squares="sum_squares" in needs, topk_ids=topk_ids, **settings,
    )  # fmt: skip
    if topk_ids is not None:
        out["topk_logp_live"] = out.pop("topk_logp")
    if needs & FULL:
        full = heads.divergences(
            tree, anchor, cfg, x, hidden(anchor), rows.response, **settings
        )  # fmt: skip
        out |= {name: full[name] for name in needs & FULL}
    return {name: v.reshape(-1, *v.shape[2:]) for name, v in out.items()}


def over_rows(
    fn: Callable[[Sequences], Any], sequences: Sequences, parts: int, layout: rules.Layout
) -> Any:
    """`fn` of all rows, computed in `parts` one after the other; its arrays are [B, T]."""
    R, G, T = sequences.response.shape
    check_rows(R, parts, layout)

    def whole(x: Array) -> Array:  # [M, B/M, T] back to [B, T], undoing the stride
        return x.reshape(parts, R // parts, G, T).swapaxes(0, 1).reshape(R * G, T)

    return jax.tree.map(whole, lax.map(fn, _cut(sequences, R, parts)))


def make_score(
    cfg: spec.ModelConfig, step: StepConfig, layout: rules.Layout
) -> Callable[[Any, Sequences], dict[str, Array]]:
    """Returns jitted score(params, sequences) -> {"logp", "entropy"}, both [B, T] float32.

    Log-probs are of the distribution at `step.temperature`; entries of padding are meaningless.
    """

    def score(params: Any, sequences: Sequences) -> dict[str, Array]:
        tree = expand(params, cfg, step, layout)
        return over_rows(
            lambda rows: _head(tree, cfg, step, layout, rows),
            sequences, step.microbatches, layout,
        )  # fmt: skip

    params = layout.tree(spec.specs(cfg))
    rows = layout.sharding(("batch",))
    return jax.jit(score, in_shardings=(params, rows), out_shardings=rows)


def _mismatch(logp: Array, batch: base.Batch) -> tuple[dict[str, Metric], dict[str, Array]]:
    """Distance of the trainer's log-probs from the sampler's: mean and k3 KL, and the maximum."""
    if batch.logp_sampler is None:
        return {}, {}
    gap = jnp.where(batch.mask > 0, lax.stop_gradient(logp) - batch.logp_sampler, 0.0)
    sums = {
        "mismatch/mean_abs_logp": Metric.of(jnp.abs(gap), batch.mask),
        "mismatch/k3_kl": Metric.of(jnp.expm1(jnp.clip(gap, -20, 20)) - gap, batch.mask),
    }
    return sums, {"mismatch/max_abs_logp": jnp.max(jnp.abs(gap))}


def state_shardings(
    model: spec.ModelConfig | spec.SpecTree,
    optimiser: optax.GradientTransformation,
    layout: rules.Layout,
) -> TrainState:
    """Shardings of a TrainState: moments lie with their parameters, all else everywhere.

    Args:
      model: a decoder's configuration, or the `Param` tree of any other parameters.
    """
    specs = spec.specs(model) if isinstance(model, spec.ModelConfig) else model
    params = layout.tree(specs)
    opt_state = optax.tree.map_params(
        optimiser,
        lambda _, s: s,
        jax.eval_shape(optimiser.init, spec.abstract(specs)),
        params,
        transform_non_params=lambda _: layout.replicated,
    )
    everywhere: Any = layout.replicated
    return TrainState(params=params, opt_state=opt_state, loss_state=everywhere, step=everywhere)


def make_init(
    model: spec.ModelConfig | spec.SpecTree,
    optimiser: optax.GradientTransformation,
    layout: rules.Layout,
) -> Callable[[Any], TrainState]:
    """Returns init(params) -> TrainState on the layout's devices, with an empty loss state.

    The state holds a float32 copy: steps donate it, and the caller's parameters stay alive.
    """
    shardings = state_shardings(model, optimiser, layout)

    def init(params: Any) -> TrainState:
        copies = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
        params = jax.device_put(copies, shardings.params)
        opt_state = jax.jit(optimiser.init, out_shardings=shardings.opt_state)(params)
        step = jax.device_put(jnp.int32(0), layout.replicated)
        return TrainState(params=params, opt_state=opt_state, loss_state=(), step=step)

    return init


def accumulate(
    grad: Callable[..., Any], tree: Any, sequences: Sequences, batch: base.Batch, parts: int
) -> Any:
    """Adds up `grad(tree, rows, part) -> (grads, (metrics, maxima))` over `parts` microbatches.

    Of each of `maxima`, a dict of scalars, the largest is kept.
    """
    if parts == 1:
        return grad(tree, sequences, batch)
    cut = _cut((sequences, batch), sequences.prompt.shape[0], parts)
    first = jax.tree.map(lambda x: x[0], cut)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(grad, tree, *first))

    def body(carry: Any, part: Any) -> Any:
        grads, (metrics, maxima) = grad(tree, *part)
        old_grads, (old_metrics, old_maxima) = carry
        grads, metrics = jax.tree.map(jnp.add, (old_grads, old_metrics), (grads, metrics))
        return (grads, (metrics, jax.tree.map(jnp.maximum, old_maxima, maxima))), None

    return lax.scan(body, zero, cut)[0]


def apply(
    optimiser: optax.GradientTransformation, state: TrainState, grads: Any, loss_state: Any
) -> TrainState:
    """The state after one update by `grads`."""
    updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(
        params=params, opt_state=opt_state, loss_state=loss_state, step=state.step + 1
    )


def make_step(
    cfg: spec.ModelConfig,
    loss: base.LossTransform,
    optimiser: optax.GradientTransformation,
    step_cfg: StepConfig,
    layout: rules.Layout,
) -> Callable[..., tuple[TrainState, dict[str, Metric]]]:
    """Returns jitted step(state, sequences, batch) -> (state, metrics); the state is donated.

    A loss that needs divergences over the whole vocabulary ("full_kl", ...) has the parameters that
    sampled the batch as a fourth argument: mu is what the trainer computes from them. That costs
    their memory, a second forward pass and four more products with the head.

    Metrics are those of the loss chain, plus "loss", "entropy", "grad_norm" and, where the batch
    has the sampler's log-probs, "mismatch/*". Read them with `.mean`.

    Raises:
      ValueError: while tracing, if the rows do not divide (`check_rows`) or the batch lacks what
        the loss reads.
    """
    full = bool(loss.needs & FULL)

    def step(
        state: TrainState, sequences: Sequences, batch: base.Batch, anchor: Any = None
    ) -> tuple[TrainState, dict[str, Metric]]:
        check_rows(sequences.prompt.shape[0], step_cfg.microbatches, layout)
        own_old = step_cfg.on_policy and "logp_old" in loss.needs
        if own_old:  # checked for by prepare, filled in per microbatch below
            batch = batch.replace(logp_old=jnp.zeros_like(batch.mask))
        batch, loss_state = loss.prepare(batch, state.loss_state)
        anchor_tree = expand(anchor, cfg, step_cfg, layout) if full else None
        tree, pull = jax.vjp(lambda p: expand(p, cfg, step_cfg, layout), state.params)

        def value(tree: Any, rows: Sequences, part: base.Batch) -> Any:
            live = _head(tree, cfg, step_cfg, layout, rows, loss.needs, part.topk_ids, anchor_tree)
            logp, entropy = live.pop("logp"), live["entropy"]
            if own_old:
                part = part.replace(logp_old=lax.stop_gradient(logp))
            live = {name: x for name, x in live.items() if name in loss.needs}
            total, metrics = loss(logp, part, loss_state, **live)
            gaps, maxima = _mismatch(logp, part)
            metrics = {
                **metrics, **gaps,
                "loss": Metric(sum=total, weight=jnp.float32(1.0)),
                "entropy": Metric.of(lax.stop_gradient(entropy), part.mask),
            }  # fmt: skip
            return total, (metrics, maxima)

        grad = jax.grad(value, has_aux=True)
        grads, (metrics, maxima) = accumulate(grad, tree, sequences, batch, step_cfg.microbatches)
        metrics["loss"] = metrics["loss"].replace(weight=jnp.float32(1.0))
        (grads,) = pull(grads)
        new = apply(optimiser, state, grads, loss_state)
        one = jnp.float32(1.0)
        for name, x in {**maxima, "grad_norm": trees.global_norm(grads)}.items():
            metrics[name] = Metric(sum=x, weight=one)
        return new, metrics

    shardings = state_shardings(cfg, optimiser, layout)
    rows = layout.sharding(("batch",))
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(shardings, rows, rows, *((shardings.params,) if full else ())),
        out_shardings=(shardings, layout.replicated),
    )
