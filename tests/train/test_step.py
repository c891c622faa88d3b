"""The training step: one result for every mesh, form and number of microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax import losses, trees
from rljax.losses import algorithms
from rljax.models import decoder, heads, layers, spec
from rljax.sharding import mesh, rules
from rljax.train import optimiser as optimisers
from rljax.train import state as states
from rljax.train import step as steps

CFG = spec.ModelConfig("llama", 64, 60, 16, 2, 4, 4, 8, 24)
R, G, P, T = 8, 2, 6, 5
OPTIMISER = optimisers.make_optimiser(optimisers.OptimiserConfig(lr=1e-2), 10)
LOSS = algorithms.grpo(kl=0.1)


def make_case():
    rng = np.random.default_rng(0)
    rows = states.Sequences(
        rng.integers(0, 60, (R, P)).astype(np.int32),
        rng.integers(1, P + 1, R).astype(np.int32),
        rng.integers(0, 60, (R, G, T)).astype(np.int32),
    )
    B = R * G
    length = rng.integers(1, T + 1, B).astype(np.int32)
    batch = losses.Batch(
        mask=(np.arange(T) < length[:, None]).astype(np.float32),
        reward=rng.random(B).astype(np.float32),
        group=np.repeat(np.arange(R), G).astype(np.int32),
        length=length,
        logp_sampler=rng.normal(-4, 0.1, (B, T)).astype(np.float32),
        logp_ref=rng.normal(-4, 0.1, (B, T)).astype(np.float32),
    )
    return rows, batch


PARAMS = spec.init(spec.specs(CFG), key=jax.random.key(1))
ROWS, BATCH = make_case()


def layout(data=1, fsdp=1, tensor=1):
    count = data * fsdp * tensor
    if count > len(jax.devices()):
        pytest.skip(f"needs {count} devices")
    made = mesh.make_mesh(mesh.MeshConfig(data, fsdp, tensor), jax.devices()[:count])
    return rules.Layout.of(made, rules.TRAIN_RULES)


def two_steps(place, config):
    state = steps.make_init(CFG, OPTIMISER, place)(PARAMS)
    state = state.replace(loss_state=LOSS.init(BATCH))
    step = steps.make_step(CFG, LOSS, OPTIMISER, config, place)
    values = []
    for _ in range(2):
        state, metrics = step(state, ROWS, BATCH)
        values.append({name: float(m.mean) for name, m in metrics.items()})
    assert step._cache_size() == 1
    return jax.device_get(state.params), values


@pytest.fixture(scope="module")
def expected():
    return two_steps(layout(), steps.StepConfig(form="stacked"))


# (data, fsdp, tensor), microbatches, form, remat
SAME = [
    ((1, 1, 1), 4, "stacked", "none"),
    ((1, 1, 1), 1, "unrolled", "block"),
    ((1, 4, 2), 2, "stacked", "none"),
    ((2, 2, 2), 1, "stacked", "block"),
    ((1, 8, 1), 1, "unrolled", "none"),
    ((4, 1, 2), 1, "unrolled", "none"),
]


@pytest.mark.parametrize("sizes,microbatches,form,remat", SAME)
def test_result_does_not_depend_on_how_it_is_computed(expected, sizes, microbatches, form, remat):
    # float32; also verl#4711: logged scalars do not depend on the microbatch size
    config = steps.StepConfig(microbatches, form=form, remat=remat)
    params, values = two_steps(layout(*sizes), config)
    for name, x in trees.flatten(expected[0]).items():
        np.testing.assert_allclose(trees.flatten(params)[name], x, atol=1e-4, err_msg=name)
    for mine, other in zip(values, expected[1], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)


STATISTICS = ("topk_logp_live", "sum_squares", "full_kl", "full_tv", "full_kl_dot", "full_tv_dot")


def measure(terms, batch):
    """Puts the mean of each statistic of the head into the metrics."""
    for name in STATISTICS:
        x = terms.live[name]
        values = jnp.sum(x * jnp.arange(1.0, 1 + x.shape[-1]), -1) if x.ndim == 3 else x
        terms = terms.measured(name, values, batch.mask)
    return terms


MEASURED = losses.chain(
    losses.group_centre(), losses.on_terms(measure, needs=STATISTICS), losses.token_mean()
)


@pytest.mark.parametrize("sizes,microbatches", [((1, 1, 1), 1), ((1, 1, 1), 4), ((2, 2, 2), 2)])
def test_statistics_of_the_head_equal_those_of_whole_logits(sizes, microbatches):
    place = layout(*sizes)
    state = steps.make_init(CFG, OPTIMISER, place)(PARAMS)
    ids = np.stack([np.roll(ROWS.response, i, 0).reshape(R * G, T) for i in range(3)], -1)
    ids[..., 2] = -1
    batch = BATCH.replace(topk_ids=ids.astype(np.int32))
    state = state.replace(loss_state=MEASURED.init(batch))
    anchor = jax.tree.map(lambda x: x * 1.05, PARAMS)
    config = steps.StepConfig(microbatches, temperature=0.7, form="stacked")
    step = steps.make_step(CFG, MEASURED, OPTIMISER, config, place)
    metrics = step(state, ROWS, batch, anchor)[1]

    @jax.jit
    def log_probs(params):
        x = decoder.grouped_hidden(params, CFG, ROWS.prompt, ROWS.prompt_length, ROWS.response)
        return jax.nn.log_softmax(heads.logits(params, CFG, x) / 0.7).reshape(R * G, T, -1)

    logp, log_mu = log_probs(PARAMS), log_probs(anchor)
    pi, mu, chosen = jnp.exp(logp), jnp.exp(log_mu), ROWS.response.reshape(R * G, T, 1)
    at = lambda x, i=chosen: jnp.take_along_axis(x, jnp.asarray(i), -1)  # noqa: E731
    q = jnp.sum(pi**2, -1, keepdims=True)
    change = pi * ((jnp.arange(CFG.vocab_size) == chosen) - pi - at(pi) + q)
    expected = {
        "topk_logp_live": (at(logp, ids[..., :2]) * jnp.asarray([1.0, 2.0])).sum(-1),
        "sum_squares": q[..., 0],
        "full_kl": jnp.where(mu > 0, mu * (log_mu - logp), 0.0).sum(-1),
        "full_tv": jnp.abs(mu - pi).sum(-1) / 2,
        "full_kl_dot": (at(pi) - at(mu))[..., 0] + (pi * (mu - pi)).sum(-1),
        "full_tv_dot": (jnp.sign(pi - mu) * change).sum(-1) / 2,
    }
    for name, x in expected.items():
        mean = float((x * BATCH.mask).sum() / BATCH.mask.sum())
        assert float(metrics[name].mean) == pytest.approx(mean, rel=2e-4, abs=2e-6), name


def test_scores_equal_a_whole_forward_pass_at_every_position():
    # trainer and sampler must agree index by index; a shift by one position fails here
    config = steps.StepConfig(microbatches=2, temperature=0.7)
    scores = steps.make_score(CFG, config, layout())(PARAMS, ROWS)
    forward = jax.jit(
        lambda tokens: heads.logits(
            PARAMS,
            CFG,
            decoder.hidden(
                PARAMS, CFG, tokens, jnp.arange(tokens.shape[1])[None], decoder.causal(CFG)
            )[0],
        )
    )
    for row in range(0, R, 3):
        n = int(ROWS.prompt_length[row])
        for g in range(G):
            tokens = np.zeros((1, P + T), np.int32)
            tokens[0, : n + T] = [*ROWS.prompt[row, :n], *ROWS.response[row, g]]
            logp = jax.nn.log_softmax(forward(tokens)[0] / 0.7)
            expected = [logp[n - 1 + t, ROWS.response[row, g, t]] for t in range(T)]
            np.testing.assert_allclose(scores["logp"][row * G + g], expected, atol=1e-4)


def test_prompt_padding_and_its_ids_change_nothing():
    score = steps.make_score(CFG, steps.StepConfig(), layout())
    before = score(PARAMS, ROWS)["logp"]
    wide = np.full((R, P + 3), 59, np.int32)
    wide[:, :P] = np.where(np.arange(P) < ROWS.prompt_length[:, None], ROWS.prompt, 7)
    after = score(PARAMS, ROWS.replace(prompt=wide))["logp"]
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_bf16_products_stay_near_float32():
    precise = steps.make_score(CFG, steps.StepConfig(), layout())(PARAMS, ROWS)["logp"]
    fast = steps.StepConfig(precision=layers.Precision(products="bfloat16"))
    rough = steps.make_score(CFG, fast, layout())(PARAMS, ROWS)["logp"]
    gap = np.abs(rough - precise).max()
    assert 0 < gap < 0.02


def test_input_parameters_survive_a_donated_step():
    two_steps(layout(), steps.StepConfig(form="stacked"))
    assert np.isfinite(np.asarray(PARAMS["embed"])).all()


def test_old_log_probs_must_come_with_an_off_policy_batch():
    place = layout()
    state = steps.make_init(CFG, OPTIMISER, place)(PARAMS)
    state = state.replace(loss_state=LOSS.init(BATCH))
    step = steps.make_step(CFG, LOSS, OPTIMISER, steps.StepConfig(on_policy=False), place)
    with pytest.raises(ValueError, match="logp_old"):
        step(state, ROWS, BATCH)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"6 rows.*4 microbatches"):
        steps.check_rows(6, 4, layout())


def test_adamw_follows_its_formula_behind_the_clip():
    # one step of Adam from zero moments moves by lr * sign(gradient), whatever the clip
    made = optimisers.make_optimiser(optimisers.OptimiserConfig(lr=0.1, clip_norm=1.0), 10)
    params = {"w": jnp.asarray([1.0, 2.0])}
    updates, _ = made.update({"w": jnp.asarray([30.0, -40.0])}, made.init(params), params)
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], [0.9, 2.1], rtol=1e-5)


def test_schedule_rises_and_decays():
    cfg = optimisers.OptimiserConfig(lr=1.0, schedule="linear", warmup_steps=2)
    schedule = optimisers.make_schedule(cfg, 6)
    np.testing.assert_allclose([schedule(i) for i in (0, 1, 2, 4, 6)], [0, 0.5, 1, 0.5, 0])
