"""Prefill, insert and generate against a whole forward pass without a cache."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from rljax.decode import engine
from rljax.decode.batching import Request, generate_all
from rljax.models import layers, spec
from rljax.sharding import mesh, reshard, rules

PROMPTS = [[5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 7, 6]]
FORMS = ["unrolled", "stacked"]
MODELS = ["plain", "odd"]


def log_softmax(z):
    z = z.astype(np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("model", "form", "share"),
    [
        ("plain", "unrolled", 1),
        ("plain", "unrolled", 2),
        ("plain", "stacked", 2),
        ("odd", "unrolled", 1),
        ("odd", "stacked", 2),
    ],
)
def test_greedy_tokens_equal_an_uncached_forward_pass(tools, model, form, share):
    cfg = getattr(tools, model)
    made, tree = tools.machine(cfg, form=form, share=share)
    requests = [Request(p, samples=share, max_tokens=10, temperature=0.0) for p in PROMPTS]
    for i, completion in enumerate(generate_all(made, tree, requests)):
        ids = list(PROMPTS[i // share])
        for token in completion.ids:
            assert token == tools.full_logits(cfg)(ids)[-1].argmax()
            ids.append(int(token))
        assert (completion.logp == 0).all()  # a point mass


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.3])
@pytest.mark.parametrize("model", MODELS)
def test_log_probs_equal_a_whole_forward_pass_at_every_position(tools, model, temperature):
    # Sampler and scorer at one temperature; 70 tokens reach the second segment of the cache.
    cfg = getattr(tools, model)
    made, tree = tools.machine(cfg)
    requests = [
        Request(p, seed=i, samples=2, max_tokens=70, temperature=temperature)
        for i, p in enumerate(PROMPTS)
    ]
    for i, c in enumerate(generate_all(made, tree, requests)):
        prompt = PROMPTS[i // 2]
        z = tools.full_logits(cfg)([*prompt, *c.ids])[len(prompt) - 1 : -1]
        place = np.arange(len(c.ids)), c.ids
        np.testing.assert_allclose(
            c.logp, log_softmax(np.maximum(z, -1e30) / temperature)[place], atol=1e-4
        )
        np.testing.assert_allclose(c.logp_full, log_softmax(z)[place], atol=1e-4)
        shifted = log_softmax(np.maximum(z, -1e30) / temperature)[place[0][:-1], c.ids[1:]]
        assert np.abs(c.logp[1:] - shifted).max() > 0.1  # the test would see a shift by one
        assert c.ids.max() < cfg.vocab_used


def test_padding_ids_and_stale_cache_change_nothing(tools):
    made, tree = tools.machine(tools.plain, slots=1)
    request = Request(PROMPTS[2], seed=3, max_tokens=12)
    first = generate_all(made, tree, [request])[0]
    # The slot's last tenant was longer in both parts of the cache.
    after = generate_all(made, tree, [Request(PROMPTS[1], seed=9, max_tokens=70), request])[1]
    np.testing.assert_array_equal(first.ids, after.ids)
    np.testing.assert_array_equal(first.logp, after.logp)
    prefixes = []
    for pad in (0, 60):
        tokens = np.full((1, 10), pad, np.int32)
        tokens[0, :3] = PROMPTS[2]
        prefixes.append(made.prefill(tree, tokens, np.asarray([3], np.int32)))
    for a, b in zip(*(jax.tree.leaves(p) for p in prefixes)):
        a, b = (np.asarray(x) for x in (a, b))
        kept = (
            (Ellipsis, slice(0, 3)) if a.shape[-1] == 10 else (Ellipsis, slice(0, 3), slice(None))
        )
        np.testing.assert_array_equal(a[kept], b[kept])


def test_nothing_is_traced_twice_and_buffers_do_not_grow(tools):
    made, tree = tools.machine(tools.plain, slots=2)
    live = []
    for call in range(6):
        requests = [
            Request(p[: 1 + call], seed=call, samples=1 + call % 3, max_tokens=3 + 5 * call,
                    temperature=0.3 * call, top_k=call, stop_ids=tuple(range(call)))
            for p in PROMPTS
        ]  # fmt: skip
        generate_all(made, tree, requests, version=call)
        gc.collect()
        live.append((len(jax.live_arrays()), sum(x.nbytes for x in jax.live_arrays())))
    assert made.traces == {"prefill": 2, "insert": 2, "generate": 1}  # one a bucket
    assert live[1:] == live[1:2] * 5
    assert made.generate._cache_size() == 1


def test_state_is_donated(tools):
    made, tree = tools.machine(tools.plain)
    state = made.init_state()
    made.generate(tree, state, np.int32(1))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("form", FORMS)
def test_decode_step_holds_no_second_cache(form):
    # Temporaries stay below the cache of one layer: 256 slots x 2 heads x 4 x 200 x 2 x 4 bytes.
    jax.config.update("jax_disable_most_optimizations", False)
    cfg = spec.ModelConfig("llama", 61, 61, 8, 3, 2, 2, 4, 8)
    config = engine.EngineConfig(256, 200, (8,), steps_per_call=2, stop_ids=1)
    made = engine.make_engine(cfg, config, rules.single(), form=form)
    tree = jax.eval_shape(made.prepare, spec.abstract(spec.specs(cfg)))
    state = jax.eval_shape(made.init_state)
    memory = made.generate.lower(tree, state, jnp.int32(1)).compile().memory_analysis()
    layer = 256 * 2 * 4 * 200 * 2 * 4
    assert memory.alias_size_in_bytes > 3 * layer
    if form == "unrolled":  # XLA's CPU backend copies a layer that it reads out of stacked ones
        assert memory.temp_size_in_bytes < layer
    else:
        assert memory.temp_size_in_bytes < 3 * layer


@pytest.mark.tpu_aot
def test_decode_step_for_a_tpu_copies_no_cache(monkeypatch):
    # Compiled for 8 chips without one. The cache of a layer is 32 MiB a chip.
    pytest.importorskip("libtpu", reason="needs libtpu: pip install -e .[tpu-aot]")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    sizes = mesh.MeshConfig(2, 1, 4)
    layout = rules.decode_layout(sizes, mesh.make_mesh(sizes, list(topology.devices)))
    cfg = spec.ModelConfig("llama", 4096, 4000, 512, 4, 8, 8, 128, 1024)
    config = engine.EngineConfig(64, 512, (128,), share=8, stop_ids=8)
    made = engine.make_engine(cfg, config, layout, form="stacked")

    def placed(like, shardings):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, shardings
        )

    specs = spec.specs(cfg)
    tree = placed(spec.abstract(specs), layout.tree(specs))
    shardings = made.init_state.lower().compile().output_shardings
    state = placed(jax.eval_shape(made.init_state), shardings)
    enough = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.replicated)
    memory = made.generate.lower(tree, state, enough).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 2**20
    assert memory.alias_size_in_bytes > 4 * 24 * 2**20  # completions alone: 384 of 512 positions


def test_sharded_engine_gives_the_tokens_of_one_device(tools):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    cfg = spec.ModelConfig("llama", 64, 59, 32, 2, 8, 4, 8, 48)
    params = spec.init(spec.specs(cfg), key=jax.random.key(1))
    params = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, params)
    requests = [Request(p, seed=i, samples=2, max_tokens=9) for i, p in enumerate(PROMPTS)]
    requests.append(Request(PROMPTS[0], max_tokens=9, temperature=0.0))
    config = engine.EngineConfig(4, 10 + 16, (10,), steps_per_call=4, share=2, stop_ids=4)
    one = engine.make_engine(cfg, config, rules.single())
    expected = generate_all(one, one.prepare(params), requests)
    source = rules.Layout.of(mesh.make_mesh(mesh.MeshConfig(1, 4, 2)), rules.TRAIN_RULES)
    layout = rules.decode_layout(mesh.MeshConfig(2, 1, 4), source.mesh)
    move = reshard.make_reshard(spec.specs(cfg), source, layout)
    params = jax.device_put(params, source.tree(spec.specs(cfg)))
    for form in FORMS:
        made = engine.make_engine(cfg, config, layout, form=form)
        tree = made.prepare(move(params))
        for a, b in zip(generate_all(made, tree, requests), expected, strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_allclose(a.logp, b.logp, atol=1e-4)
        state = jax.eval_shape(made.init_state)
        text = made.generate.lower(tree, state, jnp.int32(1)).compile().as_text()
        # Attention stays on the device that holds the head: no collective has the cache's shape.
        gathered = [line for line in text.splitlines() if " all-gather(" in line]
        assert not [line for line in gathered if "f32[4,4,8,16]" in line.split("=")[1][:40]]


def test_bfloat16_products_stay_close_to_float32(tools):
    cfg = tools.odd
    config = engine.EngineConfig(4, 10 + 16, (10,), stop_ids=2)
    precision = layers.Precision(products="bfloat16")
    made = engine.make_engine(cfg, config, rules.single(), precision)
    tree = made.prepare(tools.weights(cfg))
    assert tree["layers"][0]["down"].dtype == jnp.bfloat16
    assert tree["layers"][0]["attn_norm"].dtype == jnp.float32
    c = generate_all(made, tree, [Request(PROMPTS[1], seed=1, max_tokens=12)])[0]
    z = tools.full_logits(cfg)([*PROMPTS[1], *c.ids])[len(PROMPTS[1]) - 1 : -1]
    exact = log_softmax(z)[np.arange(12), c.ids]
    gap = np.abs(c.logp - exact)
    assert 0 < gap.max() < 1.0 and gap.mean() < 0.2  # 8 bits of mantissa, logits of size 10


def test_config_says_what_does_not_fit():
    with pytest.raises(ValueError, match="leaves no room for completions"):
        engine.EngineConfig(4, 16, (16,))
    with pytest.raises(ValueError, match="do not divide into blocks of share=3"):
        engine.EngineConfig(4, 32, (16,), share=3)
    with pytest.raises(ValueError, match="must be ascending"):
        engine.EngineConfig(4, 32, (16, 8))
