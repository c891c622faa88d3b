"""The programs of a run compile for eight TPU v5e chips; asserted are memory and collectives.

Compiled ahead of time by libtpu from abstract arguments: no chip is needed and no array is made.
Sizes are bytes per chip as the compiler allocates them. Nothing is asserted about time.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

from rljax import losses
from rljax.decode import engine as engines
from rljax.losses import algorithms
from rljax.models import layers, spec
from rljax.sharding import mesh, reshard, rules
from rljax.train import optimiser as optimisers
from rljax.train import state as states
from rljax.train import step as steps

pytestmark = pytest.mark.tpu_aot

CFG = spec.ModelConfig("llama", 32768, 32768, 256, 5, 8, 4, 64, 768)
BF16 = layers.Precision(products="bfloat16", activations="bfloat16")
R, G, P, T = 16, 8, 64, 128
MICRO = 2
FSDP, TENSOR = 4, 2  # in training; data 2 x tensor 4 in decoding
SPECS = spec.specs(CFG)


@pytest.fixture(scope="module")
def devices():
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu-aot]'")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu waits for a metadata server
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices


@pytest.fixture(scope="module")
def train(devices):
    made = mesh.make_mesh(mesh.MeshConfig(1, FSDP, TENSOR), devices)
    return rules.Layout.of(made, rules.TRAIN_RULES)


@pytest.fixture(scope="module")
def decode(train):
    return rules.decode_layout(mesh.MeshConfig(2, 1, 4), train.mesh)


def place(like: Any, shardings: Any) -> Any:
    """Abstract arrays with shardings, one for all leaves or one a leaf."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, like)
    return jax.tree.map(
        lambda x, s: ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, shardings
    )


def parameters(layout: rules.Layout, dtype: str = "float32") -> Any:
    like = jax.tree.map(lambda x: ShapeDtypeStruct(x.shape, dtype), spec.abstract(SPECS))
    return place(like, layout.tree(SPECS))


def ints(*shape: int) -> Any:
    return ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> Any:
    return ShapeDtypeStruct(shape, jnp.float32)


def bytes_per_chip(tree: Any) -> int:
    """Bytes that a chip holds of abstract arrays with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


class Collective(NamedTuple):
    kind: str
    dims: tuple[int, ...]  # of the largest result
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.dims)


KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def collectives(compiled: Any) -> list[Collective]:
    """Collectives of the optimised program, one each also where it stands in a loop."""
    found = []
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (\(?[^=]*?)\s({KINDS})(?:-start)?\(", line)
        if match:
            shapes = [
                Collective(match[2], tuple(int(n) for n in dims.split(",") if n), dtype)
                for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            ]
            found.append(max(shapes, key=lambda c: c.size))
    return found


ROWS = states.Sequences(ints(R, P), ints(R), ints(R, G, T))
# Whole logits of the tokens that a chip has at a time, float32.
LOGITS = R // FSDP // MICRO * G * T * (CFG.vocab_size // TENSOR) * 4


@pytest.fixture(scope="module")
def step(train):
    optimiser = optimisers.make_optimiser(optimisers.OptimiserConfig(lr=1e-5), 10)
    loss = algorithms.dapo(kl=0.01)
    tokens, row = floats(R * G, T), floats(R * G)
    batch = losses.Batch(
        mask=tokens, reward=row, group=ints(R * G), length=ints(R * G), truncated=row,
        logp_sampler=tokens, logp_ref=tokens,
    )  # fmt: skip
    params = parameters(train)
    shardings = steps.state_shardings(CFG, optimiser, train)
    state = states.TrainState(
        params=params,
        opt_state=place(jax.eval_shape(optimiser.init, params), shardings.opt_state),
        loss_state=place(jax.eval_shape(loss.init, batch), train.replicated),
        step=place(ints(), train.replicated),
    )
    config = steps.StepConfig(MICRO, remat="block", precision=BF16, form="stacked")
    made = steps.make_step(CFG, loss, optimiser, config, train)
    rows = train.sharding(("batch",))
    return made.lower(state, place(ROWS, rows), place(batch, rows)).compile(), params


def test_the_train_step_never_holds_whole_logits(step):
    assert step[0].memory_analysis().temp_size_in_bytes < LOGITS


def test_the_train_step_updates_its_state_in_place(step):
    memory, params = step[0].memory_analysis(), step[1]
    # Parameters and both moments of AdamW come back in the memory that they came in.
    assert memory.alias_size_in_bytes >= 3 * bytes_per_chip(params)
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2**16


def test_the_train_step_gathers_the_weights_of_one_layer_at_a_time(step):
    found = collectives(step[0])
    gathers = [c for c in found if c.kind == "all-gather"]
    blocks = [c for c in gathers if CFG.width in c.dims and CFG.vocab_size // TENSOR not in c.dims]
    assert blocks and {c.dtype for c in blocks} == {"bf16"}  # rounded before they travel
    assert max(c.size for c in blocks) <= CFG.width * CFG.mlp // TENSOR
    # Gradients are summed over the chips that saw other rows.
    assert {"reduce-scatter", "all-reduce", "collective-permute"} & {c.kind for c in found}


def test_scoring_never_holds_whole_logits(train):
    config = steps.StepConfig(MICRO, precision=BF16, form="stacked")
    score = steps.make_score(CFG, config, train)
    rows = place(ROWS, train.sharding(("batch",)))
    compiled = score.lower(parameters(train), rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < LOGITS
    assert any(c.kind == "all-gather" for c in collectives(compiled))


class Decoder(NamedTuple):
    engine: engines.Engine
    tree: Any
    state: Any
    layer: int  # bytes per chip of one layer's cache


@pytest.fixture(scope="module")
def sampler(decode):
    size = engines.EngineConfig(
        slots=64, cache_length=1024, prompt_buckets=(256,), prefill_rows=8, share=4
    )
    made = engines.make_engine(CFG, size, decode, BF16, form="stacked")
    params = parameters(decode, "bfloat16")
    prepare: Any = made.prepare
    tree = place(jax.eval_shape(prepare, params), prepare.lower(params).compile().output_shardings)
    init: Any = made.init_state
    state = place(jax.eval_shape(init), init.lower().compile().output_shardings)
    return Decoder(made, tree, state, bytes_per_chip(state.cache) // CFG.layers)


def test_prefill_compiles_and_gathers_no_weights(sampler, decode):
    prefill: Any = sampler.engine.prefill
    tokens, length = place((ints(8, 256), ints(8)), decode.replicated)
    found = collectives(prefill.lower(sampler.tree, tokens, length).compile())
    assert {c.kind for c in found} == {"all-reduce"}  # sums over heads and feed-forward only


def test_a_decode_step_does_not_copy_the_cache(sampler, decode):
    generate: Any = sampler.engine.generate
    compiled = generate.lower(sampler.tree, sampler.state, place(ints(), decode.replicated))
    compiled = compiled.compile()
    memory = compiled.memory_analysis()
    # With the cache as scan inputs and outputs, temp is all layers of it; in the carry, none.
    assert memory.temp_size_in_bytes < sampler.layer
    assert memory.alias_size_in_bytes >= bytes_per_chip(sampler.state.cache)
    # Neither cache nor weights travel: what does is smaller than the logits of the slots, and
    # than the smallest matrix of a layer on a chip.
    smallest = CFG.width * CFG.head_size * CFG.kv_heads // 4
    assert max(c.size for c in collectives(compiled)) <= smallest


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_resharding_moves_no_more_than_a_chip_lacks(train, tensor):
    target = rules.decode_layout(mesh.MeshConfig(-1, 1, tensor), train.mesh)
    found = reshard.make_reshard(SPECS, train, target, "bfloat16", group_bytes=2**22).report()
    assert found.received_bytes == found.least_bytes  # in bfloat16: cast before it travels
    assert found.temporary_bytes <= found.largest_group_bytes
