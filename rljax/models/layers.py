"""Pieces of a decoder block: products under a precision, RMS norm, rotary positions."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rljax.models import spec
from rljax.types import Array


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes inside the model; parameters, norms, softmax and log-probs stay float32.

    Attributes:
      products: dtype of the operands of every product with a weight, forward and backward; results
        are float32 always. bfloat16 is the fast form on TPU and on CPUs with AMX.
      activations: dtype of the residual stream; bfloat16 halves the memory of activations.
    """

    products: Literal["float32", "bfloat16"] = "float32"
    activations: Literal["float32", "bfloat16"] = "float32"


FLOAT32 = Precision()


def _contract(a: Array, b: Array, a_dims: tuple, b_dims: tuple, dtype: str) -> Array:
    a, b = a.astype(dtype), b.astype(dtype)
    precision = lax.Precision.HIGHEST if dtype == "float32" else None
    return lax.dot_general(
        a, b, ((a_dims, b_dims), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dot(x: Array, w: Array, inputs: int, dtype: str) -> Array:
    first = x.ndim - inputs
    if math.prod(x.shape[:first]) == 1 and jax.default_backend() == "cpu":
        return _one_row(x, w, inputs, dtype)
    return _contract(x, w, tuple(range(first, x.ndim)), tuple(range(inputs)), dtype)


def _one_row(x: Array, w: Array, inputs: int, dtype: str) -> Array:
    """The product of one row as a sum of two halves, which two cores read side by side.

    XLA's CPU backend reads the weights of a plain one 1.3 to 2 times slower.
    """
    outs = w.shape[inputs:]
    k = math.prod(w.shape[:inputs])
    parts = 2 - k % 2
    row, weights = x.reshape(parts, k // parts), w.reshape(parts, k // parts, -1)
    precision = lax.Precision.HIGHEST if dtype == "float32" else None
    halves = lax.dot_general(
        row.astype(dtype), weights.astype(dtype), (((1,), (1,)), ((0,), (0,))),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    return halves.sum(0).reshape(*x.shape[: x.ndim - inputs], *outs)


def _dot_fwd(x: Array, w: Array, inputs: int, dtype: str) -> tuple[Array, tuple[Array, Array]]:
    return _dot(x, w, inputs, dtype), (x, w)


def _dot_bwd(inputs: int, dtype: str, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = saved
    batch, outs = x.ndim - inputs, w.ndim - inputs
    dx = _contract(g, w, tuple(range(batch, batch + outs)), tuple(range(inputs, w.ndim)), dtype)
    dw = _contract(x, g, tuple(range(batch)), tuple(range(batch)), dtype)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_dot.defvjp(_dot_fwd, _dot_bwd)


def dot(x: Array, w: Array, precision: Precision, inputs: int = 1) -> Array:
    """x [..., *ins] times w [*ins, *outs] -> [..., *outs] in x's dtype, accumulated in float32.

    The backward products take operands in `precision.products` too (autodiff alone would take the
    incoming gradient in float32, which AMX and the MXU run several times slower).
    """
    out: Any = _dot(x, w, inputs, precision.products)
    return out.astype(x.dtype)


def rms_norm(x: Array, weight: Array, eps: float, plus_one: bool = False) -> Array:
    """x / rms(x) * weight in float32, cast back to x's dtype; Gemma stores weight - 1."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    w = weight.astype(jnp.float32)
    return (y * (1.0 + w if plus_one else w)).astype(x.dtype)


def rope_frequencies(
    head_size: int, theta: float, scaling: spec.RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Inverse frequencies [H/2] float64 in radians a token, and the factor on cos and sin.

    `llama3`: wavelengths longer than original/low are divided by `factor`, those shorter than
    original/high kept, a linear blend between (Llama 3.1 model card). `yarn`: a linear ramp between
    the dimensions that turn `beta_fast` and `beta_slow` times in the original length (Peng et al.,
    arXiv 2309.00071, eq. 22-23), cos and sin multiplied by 0.1 ln(factor) + 1.
    """
    index = np.arange(0, head_size, 2, dtype=np.float64) / head_size
    inverse = theta**-index
    if scaling is None:
        return inverse, 1.0
    stretched = inverse / scaling.factor
    if scaling.kind == "linear":
        return stretched, 1.0
    original = scaling.original_positions
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = original * inverse / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return keep * inverse + (1 - keep) * stretched, 1.0

    def dimension(turns: float) -> float:
        return head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), head_size - 1)
    ramp = np.clip((np.arange(head_size // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return ramp * stretched + (1 - ramp) * inverse, factor


def rope_tables(cfg: spec.ModelConfig, positions: Array) -> tuple[Array, Array]:
    """cos and sin [kinds, ..., H/2] float32 at int32 `positions` [...]; kinds: global, local.

    Local layers differ only where the config has a second base (Gemma 3), which is never scaled.
    """
    kinds = [rope_frequencies(cfg.head_size, cfg.rope_theta, cfg.rope_scaling)]
    if cfg.rope_theta_local is not None:
        kinds.append(rope_frequencies(cfg.head_size, cfg.rope_theta_local, None))
    elif any(cfg.local):
        kinds.append(kinds[0])
    angle = positions.astype(jnp.float32)[..., None]
    tables = [
        (factor * jnp.cos(angle * f), factor * jnp.sin(angle * f))
        for f, factor in ((jnp.asarray(inv, jnp.float32), factor) for inv, factor in kinds)
    ]
    cos, sin = zip(*tables, strict=True)
    return jnp.stack(cos), jnp.stack(sin)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates x [..., heads, H] by tables [..., H/2]; half-split pairs (i, i + H/2)."""
    y = x.astype(jnp.float32)
    a, b = jnp.split(y, 2, -1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def activate(x: Array, kind: spec.Activation) -> Array:
    """SiLU, or the tanh form of GELU (Gemma)."""
    return jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=True)
