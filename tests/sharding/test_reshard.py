"""The move between layouts: values, planned steps, and the bytes that the programs move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rljax import trees
from rljax.models import spec
from rljax.sharding import collectives, mesh, reshard, rules

CFG = spec.ModelConfig("llama", 64, 60, 16, 2, 8, 8, 8, 32)
SPECS = spec.specs(CFG)

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def train(data=1, fsdp=4, tensor=2):
    return rules.Layout.of(mesh.make_mesh(mesh.MeshConfig(data, fsdp, tensor)), rules.TRAIN_RULES)


def decode(source, tensor):
    return rules.decode_layout(mesh.MeshConfig(-1, 1, tensor), source.mesh)


TABLE = [
    (sizes, tensor)
    for sizes in [(1, 8, 1), (1, 4, 2), (2, 2, 2), (1, 2, 4), (1, 1, 8), (4, 1, 2), (8, 1, 1)]
    for tensor in (1, 2, 4, 8)
]


@pytest.mark.parametrize("sizes,tensor", TABLE)
def test_a_device_receives_only_what_it_lacks(sizes, tensor):
    source = train(*sizes)
    found = reshard.make_reshard(SPECS, source, decode(source, tensor)).report()
    assert found.received_bytes == found.least_bytes
    assert found.temporary_bytes <= found.largest_group_bytes + 1024  # padding of tiny buffers


@pytest.mark.parametrize("sizes,tensor", [((1, 4, 2), 4), ((1, 1, 8), 2), ((2, 2, 2), 8)])
def test_values_are_moved_unchanged_there_and_back(sizes, tensor):
    source = train(*sizes)
    target = decode(source, tensor)
    params = jax.device_put(spec.init(SPECS, key=jax.random.key(0)), source.tree(SPECS))
    moved = reshard.make_reshard(SPECS, source, target, group_bytes=4096)(params)
    back = reshard.make_reshard(SPECS, target, source, donate=True)
    for name, x in trees.flatten(params).items():
        y = trees.flatten(moved)[name]
        assert y.sharding == trees.flatten(target.tree(SPECS))[name]
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)
    for name, y in trees.flatten(back(moved)).items():
        np.testing.assert_array_equal(np.asarray(trees.flatten(params)[name]), np.asarray(y))


def test_the_cast_to_the_samplers_dtype_comes_before_the_move():
    source = train()
    move = reshard.make_reshard(SPECS, source, decode(source, 4), "bfloat16")
    params = jax.device_put(spec.init(SPECS, key=jax.random.key(0)), source.tree(SPECS))
    for name, y in trees.flatten(move(params)).items():
        x = trees.flatten(params)[name].astype(jnp.bfloat16)
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_leaves_that_did_not_change_are_not_moved_again():
    source = train()
    move = reshard.make_reshard(SPECS, source, decode(source, 4), group_bytes=1)
    params = jax.device_put(spec.init(SPECS, key=jax.random.key(0)), source.tree(SPECS))
    moved = move(params)
    changed = {**params, "embed": params["embed"] + 1}
    again = move(changed, before=(params, moved))
    assert all(again["layers"][n] is moved["layers"][n] for n in moved["layers"])
    np.testing.assert_array_equal(np.asarray(again["embed"]), np.asarray(changed["embed"]))


def test_disjoint_devices_go_by_device_put():
    first, second = jax.devices()[:4], jax.devices()[4:]
    config = mesh.MeshConfig(1, 2, 2)
    source = rules.Layout.of(mesh.make_mesh(config, first), rules.TRAIN_RULES)
    target = rules.Layout.of(mesh.make_mesh(config, second), rules.TRAIN_RULES)
    move = reshard.make_reshard(SPECS, source, target)
    params = jax.device_put(spec.init(SPECS, key=jax.random.key(0)), source.tree(SPECS))
    moved = move(params)
    assert moved["embed"].sharding.device_set == set(second)
    np.testing.assert_array_equal(np.asarray(moved["embed"]), np.asarray(params["embed"]))
    with pytest.raises(ValueError, match="different devices"):
        move.report()


PIPELINES = [
    (p, t, p_g, t_g)
    for p in (1, 2, 4) for t in (1, 2, 4, 8) if p * t <= 8
    for p_g in (1, 2, 4) for t_g in (1, 2, 4, 8) if p % p_g == 0 and t % t_g == 0
]  # fmt: skip


def move_of(shape, source, target):
    """(received, least) bytes of one float32 array's move, by its planned program."""
    way = reshard.path(source, target, shape)

    def move(x):
        for step in way[:-1]:
            x = jax.lax.with_sharding_constraint(x, step)
        return x

    like = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=source)
    text = jax.jit(move, out_shardings=target).lower(like).compile().as_text()
    received = sum(c.received_bytes for c in collectives.read(text, 8))
    return received, reshard.least_bytes(source, target, shape, 4)


def device_mesh(shape, names):
    devices = np.asarray(jax.devices()[:8]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize("p,t,p_g,t_g", PIPELINES)
def test_stages_and_tensor_shards_are_gathered_without_redundancy(p, t, p_g, t_g):
    """HybridFlow, arXiv 2409.19256, table 2: (d_g - 1) / (t p) of the weights."""
    shape, d = (8, 32), 8 // (p * t)
    source = NamedSharding(
        device_mesh((d, p, t), ("data", "stage", "tensor")), PartitionSpec("stage", "tensor")
    )
    strided = device_mesh(
        (d, p_g, p // p_g, t_g, t // t_g), ("data", "stage", "stages", "tensor", "micro")
    )
    weights, d_g = 4 * 8 * 32, p * t // (p_g * t_g)
    bound = (d_g - 1) * weights // (t * p)
    received, least = move_of(
        shape, source, NamedSharding(strided, PartitionSpec("stage", "tensor"))
    )
    assert (received, least) == (bound, bound)
    if p == 1 and 1 < t_g < t:
        naive = device_mesh((d, t // t_g, t_g), ("data", "micro", "tensor"))
        received, least = move_of(
            shape, source, NamedSharding(naive, PartitionSpec(None, "tensor"))
        )
        assert received > bound and least > bound


def test_layouts_without_a_common_refinement_are_moved_as_they_are():
    devices = np.asarray(jax.devices()[:6])
    auto = (AxisType.Auto,) * 2
    source = NamedSharding(
        Mesh(devices.reshape(2, 3), ("a", "b"), axis_types=auto), PartitionSpec("a", "b")
    )
    target = NamedSharding(
        Mesh(devices.reshape(3, 2), ("a", "b"), axis_types=auto), PartitionSpec("b", "a")
    )
    assert reshard.path(source, target, (6, 6)) == [target]


def test_a_decode_tensor_axis_that_neither_divides_nor_is_divided_is_refused():
    source = rules.Layout.of(
        mesh.make_mesh(mesh.MeshConfig(1, 3, 2), jax.devices()[:6]), rules.TRAIN_RULES
    )
    with pytest.raises(ValueError, match=r"tensor=3 beside mesh.tensor=2.*work: \[1, 2, 6\]"):
        decode(source, 3)
    with pytest.raises(ValueError, match=r"set decode\.mesh\.fsdp to 1"):
        rules.decode_layout(mesh.MeshConfig(1, 3, 2), source.mesh)


def test_collectives_are_read_from_a_programs_text():
    text = """
  %a = f32[16,64]{1,0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %b = (bf16[4,8]{1,0}, bf16[4,8]{1,0}) all-to-all(%x, %y), replica_groups={{0,1},{2,3}}
  %c = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[4,2]<=[8], dimensions={0}
  %d = f32[8]{0} all-gather-done(%c)
  %f = f32[8]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}
  %g = f32[8]{0} all-gather(%p), replica_groups=mesh['a'=8], device_ids=([8]) {'a':(2)4}
  %e = u8[10]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
"""
    found = collectives.read(text, 8)
    assert [(c.kind, c.dtype, c.result_bytes, c.group) for c in found] == [
        ("all-gather", "f32", 4096, 4),
        ("all-to-all", "bf16", 128, 2),
        ("all-gather", "f32", 32, 2),
        ("all-gather", "f32", 32, 2),
        ("all-gather", "f32", 32, 4),
        ("collective-permute", "u8", 10, 1),
    ]
    assert [c.received_bytes for c in found] == [3072, 64, 16, 16, 24, 10]
