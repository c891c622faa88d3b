"""Records (frozen dataclasses that are pytrees) and the metric that adds over any split."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, dataclass_transform

import jax
import jax.numpy as jnp

Array = jax.Array


def static(**kwargs: Any) -> Any:
    """Marks a record field as static: part of the tree's structure, not one of its leaves."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
class Record:
    """Base of frozen dataclasses registered as pytrees; subclassing is all it takes.

        class Point(Record):
            x: Array
            name: str = static(default="origin")

    Fields made with `static` are compared, hashed and never traced.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        jax.tree_util.register_dataclass(
            cls,
            data_fields=[f.name for f in fields if not f.metadata.get("static")],
            meta_fields=[f.name for f in fields if f.metadata.get("static")],
        )

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with the named fields changed."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]


class Metric(Record):
    """A weighted sum and its weight, so that parts of a batch can be added in any order.

    Attributes:
      sum: sum of weight x value, float32 scalar.
      weight: sum of weights (a token or sequence count), float32 scalar.
    """

    sum: Array
    weight: Array

    @classmethod
    def of(cls, values: Array, weights: Array) -> Metric:
        """Metric of `values` under `weights` (same shape); weight 0 ignores even a NaN."""
        weights = weights.astype(jnp.float32)
        kept = jnp.where(weights > 0, values.astype(jnp.float32), 0.0)
        return cls(sum=jnp.sum(kept * weights), weight=jnp.sum(weights))

    def __add__(self, other: Metric) -> Metric:
        return Metric(sum=self.sum + other.sum, weight=self.weight + other.weight)

    @property
    def mean(self) -> Array:
        """sum / weight, 0 where nothing was counted."""
        return self.sum / jnp.maximum(self.weight, 1e-9) * (self.weight > 0)
