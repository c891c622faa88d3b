"""Layouts: shardings of parameters, and what does not fit."""

import jax
import pytest
from jax.sharding import PartitionSpec

from rljax import trees
from rljax.models import spec
from rljax.sharding import mesh, rules

CFG = spec.ModelConfig("llama", 64, 60, 16, 2, 4, 4, 8, 24)

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def train(data=1, fsdp=4, tensor=2):
    return rules.Layout.of(mesh.make_mesh(mesh.MeshConfig(data, fsdp, tensor)), rules.TRAIN_RULES)


def test_each_logical_axis_lies_on_its_mesh_axis():
    shardings = trees.flatten(train().tree(spec.specs(CFG)))
    assert shardings["embed"].spec == PartitionSpec("tensor", "fsdp")
    assert shardings["layers/q"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert shardings["layers/down"].spec == PartitionSpec(None, "tensor", "fsdp")


def test_a_dimension_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"layers/k: dimension 2 \(kv_heads, size 4\).*8"):
        train(1, 1, 8).tree({"layers": {"k": spec.specs(CFG)["layers"]["k"]}})


def test_two_logical_axes_on_one_mesh_axis_are_refused():
    same = rules.Layout.of(train().mesh, {**rules.TRAIN_RULES, "heads": ("fsdp",)})
    with pytest.raises(ValueError, match="both map to mesh axis 'fsdp'"):
        same.tree(spec.specs(CFG))


def test_a_mesh_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match=r"needs 12 devices.*has 8"):
        mesh.make_mesh(mesh.MeshConfig(1, 4, 3))
