"""Contracts for code that people add: `check_loss` is the one that every loss chain passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.losses.base import Batch, LossTransform, is_mark
from rljax.types import Array, Metric

GARBAGE = (np.nan, np.inf, -np.inf, 1e30)
Live = dict[str, Array]
FULL = ("full_kl", "full_tv", "full_kl_dot", "full_tv_dot")  # 0 where policy and sampler agree
VOCABULARY = {"topk_ids", "topk_logp_live", "sum_squares", *FULL}


def check_loss(
    loss: LossTransform,
    batch: Batch | None = None,
    *,
    live: Live | None = None,
    on_policy: bool = True,
    seed: int = 0,
) -> None:
    """Raises AssertionError, naming the property, unless the loss keeps the contract of a chain.

    The properties: it reads only what `needs` names; it can be jitted and traces once, also with
    the state it returned; garbage under the mask changes nothing and has gradient 0;
    1, 2, 4 and 8 microbatches agree in value, gradient and metrics; so do 1 and up to 8 devices
    (as many as there are); at ratio 1 the gradient is REINFORCE's, -weight * advantage, beside
    whatever does not depend on the advantage; value, gradient and metrics are float32 (the gradient
    of bfloat16 log-probs bfloat16); the state is a pytree of arrays that survives a checkpoint; an
    all-masked batch gives 0; log ratios of +-1000 and a log-prob of -inf give finite numbers.

    Args:
      loss: a complete chain.
      batch: a raw batch of 8, 16, ... rows in place of the random one, which has 16 rows of
        different lengths, one of them empty and one with a hole, in groups of 4, one of them flat.
      live: the live arrays of `batch`'s shape that `needs` names, where random positive [B, T] will
        not do. Without `batch` those over the vocabulary are of random distributions that agree.
      on_policy: False skips the property at ratio 1, for losses meant to differ there.
      seed: of the random batch.
    """
    case = _Case(loss, batch, live, seed)
    case.first_run()
    _check_dtypes(case)
    _check_state(case)
    _check_traces_once(case)
    _check_padding(case)
    _check_microbatches(case)
    _check_devices(case)
    if on_policy:
        _check_ratio_one(case)
    _check_all_masked(case)
    _check_extremes(case)


class _Case:
    """A loss with a batch to try it on, and its two compiled programs."""

    def __init__(self, loss: LossTransform, batch: Batch | None, live: Live | None, seed: int):
        rng = np.random.default_rng(seed)
        self.loss = loss
        self.raw = batch if batch is not None else random_batch(loss, rng)
        rows, length = self.raw.mask.shape
        if rows % 8:
            raise ValueError(
                f"check_loss cuts the batch by 8, and it has {rows} rows; give 8 or 16"
            )
        self.anchors = [n for n in sorted(loss.needs) if n.startswith("logp_")]
        fields = {f.name for f in dataclasses.fields(self.raw)}  # pyright: ignore
        names = sorted(n for n in loss.needs - fields if not is_mark(n))
        self.live = {n: _uniform(rng, (rows, length), 0.1, 2.0) for n in names} | (live or {})
        self.live, self.raw = jax.device_get((self.live, self.raw))  # numpy: no small programs
        noise = [getattr(self.raw, n) for n in self.anchors] or [
            _uniform(rng, (rows, length), -3, -1)
        ]
        self.logp = np.asarray(noise[0]) + _uniform(rng, (rows, length), -0.3, 0.3)
        if VOCABULARY & loss.needs:
            self._draw_vocabulary(rng, batch is not None, live or {})
        self.traces = 0
        self.part = jax.jit(self._part, compiler_options=_quick())
        self.whole = jax.jit(self._whole, compiler_options=_quick())

    def _draw_vocabulary(self, rng: np.random.Generator, given: bool, live: Live) -> None:
        """Log-probs, top-K and whole-vocabulary arrays of two random distributions per token."""
        if given:
            if self.raw.topk_logp is not None and "topk_logp_live" not in live:
                shape = self.raw.topk_logp.shape
                noise = _uniform(rng, shape, -0.2, 0.0)
                self.live["topk_logp_live"] = np.asarray(self.raw.topk_logp) + noise
            return
        fields, statistics, self.logp = _vocabulary(rng, self.raw.mask.shape)
        wanted = {n: x for n, x in fields.items() if n in self.loss.needs}
        self.raw = self.raw.replace(**wanted)
        self.live |= {n: x for n, x in statistics.items() if n in self.live and n not in live}

    def _part(self, logp: Array, batch: Batch, state: Any, live: Live) -> tuple[Any, Array, Any]:
        """(value, gradient, metrics) of a prepared batch."""
        fn = jax.value_and_grad(lambda x: self.loss(x, batch, state, **live), has_aux=True)
        (value, metrics), gradient = fn(logp)
        return value, gradient, metrics

    def _whole(self, logp: Array, raw: Batch, state: Any, live: Live) -> tuple[Any, ...]:
        """The same of a raw batch, with the prepared batch and the next state."""
        self.traces += 1
        batch, state = self.loss.prepare(raw, state)
        return *self._part(logp, batch, state, live), batch, state

    def run(self, logp: Any = None, raw: Any = None, live: Any = None) -> tuple[Any, ...]:
        """`whole` from the first state, on changed inputs, as numpy."""
        logp, raw = self.logp if logp is None else logp, raw or self.raw
        state = self.loss.init(jax.tree.map(jnp.asarray, raw))
        return jax.device_get(self.whole(logp, raw, state, live or self.live))

    def first_run(self) -> None:
        state = self.loss.init(jax.tree.map(jnp.asarray, self.raw))
        try:
            out = self.whole(self.logp, self.raw, state, self.live)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise AssertionError(f"jit: the loss does not trace; {error}") from error
        except (AttributeError, TypeError) as error:
            raise AssertionError(
                f"needs: the loss fails on a batch with what it names, {sorted(self.loss.needs)}; "
                f"does a member read another field or live array? {type(error).__name__}: {error}"
            ) from error
        self.state = out[-1]
        self.value, self.gradient, self.metrics, self.batch = jax.device_get(out[:-1])
        policy = self.batch.weight * self.batch.advantage
        self.scale = np.sum(np.abs(policy)) + np.sum(np.abs(self.gradient))  # of the value
        _expect(_finite(out[:3]), "finite", "value, gradient or metrics are not, on ordinary data")


def random_batch(loss: LossTransform, rng: np.random.Generator) -> Batch:
    """16 rows of up to 7 tokens with the fields that the loss needs: ragged, in groups of 4."""
    rows, length, group = 16, 7, 4
    lengths = rng.integers(1, length + 1, rows)
    lengths[[0, 5]] = length, 0
    mask = (np.arange(length) < lengths[:, None]).astype(np.float32)
    mask[0, 2:4] = 0.0  # text that a tool wrote
    ids = np.arange(rows) // group
    reward = np.where(ids == 2, 1.0, rng.normal(size=rows)).astype(np.float32)
    sequence = {
        "reward": reward,
        "group": np.asarray(3 * ids + 1, np.int32),
        "length": np.asarray(lengths, np.int32),
        "truncated": np.asarray(lengths == length, np.float32),
        "turn": np.tile(np.arange(length, dtype=np.int32) // 2, (rows, 1)),
        "role": np.asarray(np.arange(rows) % 2, np.int32),
        "budget_score": _uniform(rng, (rows, 4), 0.0, 1.0),
    }
    logp = _uniform(rng, mask.shape, -3.0, -0.1)
    wanted = sorted(loss.needs & {f.name for f in dataclasses.fields(Batch)})  # pyright: ignore
    values = {}
    for name in wanted:
        token = _uniform(rng, mask.shape, -0.5, 0.5)
        values[name] = sequence.get(name, logp + token if name.startswith("logp_") else token)
    return jax.tree.map(jnp.asarray, Batch(mask=mask, **values))  # pyright: ignore[reportArgumentType]


def _vocabulary(
    rng: np.random.Generator, shape: tuple[int, ...], vocab: int = 12, k: int = 4
) -> tuple[dict[str, Any], Live, Any]:
    """(Batch fields, live arrays, logp) of a sampler and a policy drawn for each token."""

    def pick(x: Any, ids: Any) -> Any:
        return np.take_along_axis(x, ids, -1).astype(np.float32)

    log_mu = rng.normal(size=(*shape, vocab))
    log_pi = log_mu + 0.5 * rng.normal(size=log_mu.shape)
    log_mu, log_pi = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (log_mu, log_pi))
    mu, pi = np.exp(log_mu), np.exp(log_pi)
    token = rng.integers(0, vocab, (*shape, 1))
    topk = np.argsort(-mu, axis=-1)[..., :k]
    ids = topk.astype(np.int32)
    ids[..., -1][rng.random(shape) < 0.2] = -1  # an empty slot
    fields = {
        "token": token[..., 0].astype(np.int32),
        "logp_sampler": pick(log_mu, token)[..., 0],
        "topk_ids": ids,
        "topk_logp": pick(log_mu, topk),
    }
    squares = np.sum(pi**2, axis=-1, keepdims=True)
    one = np.arange(vocab) == token
    flow = pi * (one - pi - np.take_along_axis(pi, token, -1) + squares)
    live = {
        "topk_logp_live": pick(log_pi, topk),
        "sum_squares": squares[..., 0],
        "full_kl": np.sum(mu * (log_mu - log_pi), axis=-1),
        "full_tv": 0.5 * np.sum(np.abs(mu - pi), axis=-1),
        "full_kl_dot": -np.sum(mu / pi * flow, axis=-1),
        "full_tv_dot": 0.5 * np.sum(np.sign(pi - mu) * flow, axis=-1),
    }
    return fields, {n: x.astype(np.float32) for n, x in live.items()}, pick(log_pi, token)[..., 0]


def _check_dtypes(case: _Case) -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        logp = jax.ShapeDtypeStruct(case.logp.shape, dtype)
        out = jax.eval_shape(case._part, logp, case.batch, case.state, case.live)
        found = {"value": out[0].dtype, "gradient": out[1].dtype}
        found |= {f"metric {k}": m.sum.dtype for k, m in out[2].items()}
        wanted = dict.fromkeys(found, jnp.float32) | {"gradient": dtype}
        wrong = [f"{n} is {found[n]}" for n in found if found[n] != wanted[n]]
        _expect(not wrong, "dtype", f"{', '.join(wrong)} for {logp.dtype} log-probs")
    for name in ("weight", "advantage"):
        dtype = getattr(case.batch, name).dtype
        _expect(dtype == jnp.float32, "dtype", f"prepare made Batch.{name} {dtype}, not float32")


def _check_state(case: _Case) -> None:
    for leaf in jax.tree.leaves(case.loss.init(jax.tree.map(jnp.asarray, case.raw))):
        ok = isinstance(leaf, jax.Array | np.ndarray)
        _expect(ok, "state", f"init returned a {type(leaf).__name__} leaf; make it a jax array")
    leaves, tree = jax.tree.flatten(case.state)
    restored = jax.tree.unflatten(tree, [np.asarray(leaf) for leaf in leaves])
    value, _, _ = case.part(case.logp, case.batch, restored, case.live)
    same = _close(value, case.value, case.scale)
    _expect(same, "state", "a state restored from numpy gives another value")


def _check_traces_once(case: _Case) -> None:
    case.whole(case.logp * 0.9, case.raw, case.state, case.live)
    _expect(
        case.traces == 1,
        "no retrace",
        "prepare returned a state of another structure, shape or dtype than init's (a weak type "
        "counts: write jnp.zeros(()), not jnp.asarray(0.0)), so each step may compile again",
    )


def _check_padding(case: _Case) -> None:
    outside = case.raw.mask <= 0
    fill = np.resize(np.asarray(GARBAGE, np.float32), outside.shape)

    def spoil(x: Any) -> Any:
        if x.shape[:2] != outside.shape or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        lift = (..., *[None] * (x.ndim - 2))
        return np.where(outside[lift], fill[lift], x)

    raw = jax.tree.map(spoil, case.raw).replace(mask=case.raw.mask)
    live = jax.tree.map(spoil, case.live)
    value, gradient, metrics, *_ = case.run(spoil(case.logp), raw, live)
    what = "NaN, inf and 1e30 under the mask"
    for found in (gradient, case.gradient):
        _expect(np.all(found[outside] == 0), "padding", "tokens under the mask have a gradient")
    same = _close(value, case.value, case.scale)
    _expect(same, "padding", f"{what} changed the value from {case.value} to {value}")
    _expect(_close(gradient, case.gradient), "padding", f"{what} changed the gradient")
    for name, metric in case.metrics.items():
        same = _close(metrics[name].sum, metric.sum, metric.weight)
        _expect(same, "padding", f"{what} changed the metric {name}")


def _check_microbatches(case: _Case) -> None:
    rows = len(case.logp)
    for pieces in (2, 4, 8):
        cut = rows // pieces
        parts = []
        for start in range(0, rows, cut):
            piece = jax.tree.map(
                lambda x, start=start, cut=cut: x[start : start + cut],
                (case.logp, case.batch, case.live),
            )
            parts.append(jax.device_get(case.part(piece[0], piece[1], case.state, piece[2])))
        gradient = np.concatenate([p[1] for p in parts])
        metrics = {k: _sum([p[2][k] for p in parts]) for k in case.metrics}
        _same(case, f"{pieces} microbatches", _sum([p[0] for p in parts]), gradient, metrics)


def _check_devices(case: _Case) -> None:
    count = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
    if count == 1:
        return
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:count]), ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    logp, raw, live = jax.device_put((case.logp, case.raw, case.live), rows)
    state = jax.device_put(case.loss.init(raw), everywhere)
    before = case.traces
    value, gradient, metrics, *_ = case.whole(logp, raw, state, live)
    case.traces = before
    _same(case, f"{count} devices", value, gradient, metrics)


def _check_ratio_one(case: _Case) -> None:
    raw = case.raw.replace(**dict.fromkeys(case.anchors, case.logp))
    live = case.live | {n: np.zeros_like(case.live[n]) for n in FULL if n in case.live}
    if "topk_logp_live" in live and raw.topk_logp is not None:
        live["topk_logp_live"] = raw.topk_logp
    _, gradient, _, batch, state = case.run(raw=raw, live=live)
    nothing = batch.replace(advantage=np.zeros_like(batch.advantage))
    _, without, _ = case.part(case.logp, nothing, state, live)
    found = gradient - np.asarray(without)
    wanted = -batch.weight * batch.advantage  # pyright: ignore[reportOptionalOperand]
    _expect(
        _close(found, wanted),
        "ratio 1",
        "where policy and anchor agree the gradient is not REINFORCE's -weight * advantage "
        f"(largest difference {np.max(np.abs(found - wanted)):.3g}, largest gradient "
        f"{np.max(np.abs(wanted)):.3g}); on_policy=False if the loss is meant to differ",
    )


def _check_all_masked(case: _Case) -> None:
    raw = case.raw.replace(mask=np.zeros_like(case.raw.mask))
    value, gradient, metrics, _, state = case.run(raw=raw)
    ok = value == 0 and np.all(gradient == 0)
    _expect(ok, "all masked", f"a batch without trained tokens gives value {value}, not 0")
    what = "a batch without trained tokens makes a metric or the state non-finite"
    _expect(_finite((metrics, state)), "all masked", f"{what}; divide by jnp.maximum(count, 1.0)")


def _check_extremes(case: _Case) -> None:
    rows, length = case.logp.shape
    place = np.arange(rows * length).reshape(rows, length)
    lower = np.where(place % 2, np.float32(1000.0), np.float32(0.0))  # the policy or the anchor
    anchors = {n: getattr(case.raw, n) - (1000.0 - lower) for n in case.anchors}
    out = case.run(case.logp - lower, case.raw.replace(**anchors))
    _expect(_finite(out[:3]), "extremes", "log ratios of +-1000 give NaN or inf; clamp before exp")
    banned = np.where(place == 0, -np.float32(np.inf), case.logp)
    value, gradient, metrics, *_ = case.run(banned)
    ok = _finite((value, gradient, metrics)) and gradient[0, 0] == 0
    _expect(ok, "extremes", "a sampled token of log-prob -inf gives NaN, inf or a gradient there")


def _same(case: _Case, what: str, value: Any, gradient: Any, metrics: Any) -> None:
    """Expects the three to equal those of the whole batch on one device."""
    _expect(
        _close(value, case.value, case.scale),
        what,
        f"give value {value}, the whole batch {case.value}; a mean or a count belongs in "
        "`prepare`, where the full batch is seen",
    )
    _expect(_close(gradient, case.gradient), what, "give another gradient than the whole batch")
    for name, metric in case.metrics.items():
        _expect(isinstance(metric, Metric), what, f"metric {name} is not a Metric(sum, weight)")
        scale = metric.weight
        ok = _close(metrics[name].sum, metric.sum, scale) and _close(metrics[name].weight, scale)
        _expect(ok, what, f"give another metric {name} than the whole batch; build it by Metric.of")


def _close(a: Any, b: Any, scale: Any = 0.0) -> bool:
    """Equal to 1e-5 of the largest entry, or of `scale` where terms may cancel."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return bool(np.max(np.abs(a - b)) <= 1e-5 * max(np.max(np.abs(b)), scale, 1e-12))


def _quick() -> dict[str, Any]:
    """Options that halve the compile time where programs this small are run once."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def _finite(tree: Any) -> bool:
    return all(np.all(np.isfinite(np.asarray(x))) for x in jax.tree.leaves(tree))


def _sum(parts: list[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Any:
    return rng.uniform(low, high, shape).astype(np.float32)


def _expect(ok: Any, rule: str, fact: str) -> None:
    if not ok:
        raise AssertionError(f"{rule}: {fact}")
