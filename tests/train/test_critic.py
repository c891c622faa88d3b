"""The critic: its values sit where the log-probs do, it learns, and microbatches change nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.losses import algorithms
from rljax.models import decoder, spec
from rljax.sharding import rules
from rljax.train import critic
from rljax.train import optimiser as optimisers
from rljax.train import step as steps
from rljax.train.state import Sequences

CFG = spec.ModelConfig("llama", 64, 60, 16, 2, 4, 4, 8, 24, tied=False)
POLICY = spec.init(spec.specs(CFG), key=jax.random.key(0))
R, G, P, T = 4, 2, 6, 5
LOSS = algorithms.critic()


def make_case() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(0, 60, (R, P)), rng.integers(0, 60, (R, G, T))
    arrays: Any = (prompt, rng.integers(2, P + 1, R), response)
    rows = Sequences(*(x.astype(np.int32) for x in arrays))
    mask = (np.arange(T) < rng.integers(1, T + 1, R * G)[:, None]).astype(np.float32)
    target = np.repeat(rng.integers(0, 2, R * G), T).reshape(-1, T).astype(np.float32)
    given: Any = {"mask": mask, "value_target": target * mask}
    return rows, L.Batch(**given)


ROWS, BATCH = make_case()


def learn(config: critic.CriticConfig, microbatches: int, count: int) -> tuple[Any, list[Any]]:
    optimiser = optimisers.make_optimiser(optimisers.OptimiserConfig(lr=1e-2), count)
    place, step = rules.single(), steps.StepConfig(microbatches)
    own = critic.specs(CFG, config.backbone)
    state = steps.make_init(own, optimiser, place)(critic.init(POLICY, CFG, config.backbone))
    state = state.replace(loss_state=LOSS.init(BATCH))
    update = critic.make_critic_step(CFG, config, LOSS, optimiser, step, place)
    policy, values = POLICY if config.backbone == "shared" else {}, []
    for _ in range(count):
        state, metrics = update(state, policy, ROWS, BATCH)
        values.append({k: float(m.mean) for k, m in metrics.items()})
    assert update._cache_size() == 1
    return jax.device_get(state.params), values


def test_a_value_is_read_before_its_token():
    # A whole forward pass of prompt and response: token t is judged at column n - 1 + t.
    params = critic.init(POLICY, CFG)
    params["value"] = jax.random.normal(jax.random.key(1), (CFG.width,))
    config = critic.CriticConfig(bounds=(-1.0, 3.0))
    score = critic.make_value_score(CFG, config, steps.StepConfig(2), rules.single())
    got = score(params, ROWS)
    forward = jax.jit(
        lambda tokens: decoder.hidden(
            POLICY, CFG, tokens, jnp.arange(P + T)[None], decoder.causal(CFG)
        )[0]
    )
    for row in range(R):
        n = int(ROWS.prompt_length[row])
        for g in range(G):
            tokens = np.zeros((1, P + T), np.int32)
            tokens[0, : n + T] = [*ROWS.prompt[row, :n], *ROWS.response[row, g]]
            raw = forward(tokens)[0] @ params["value"]
            wanted = L.bounded(raw[n - 1 : n - 1 + T], -1.0, 3.0)
            np.testing.assert_allclose(got[row * G + g], wanted, atol=1e-4)


@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_a_critic_learns_and_a_shared_one_by_its_head_alone(backbone):
    params, values = learn(critic.CriticConfig(backbone), 1, 60)
    assert values[0]["value/mean"] == pytest.approx(0.5)  # the middle of the bounds
    assert values[-1]["value/loss"] < 0.8 * values[0]["value/loss"]
    assert "head" not in params and set(params) >= set(critic.VALUE)
    assert ("layers" in params) == (backbone == "separate")
    if backbone == "separate":
        assert np.any(params["layers"]["q"] != POLICY["layers"]["q"])


def test_microbatches_change_nothing():
    one, first = learn(critic.CriticConfig(), 1, 3)
    two, second = learn(critic.CriticConfig(), 2, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one, two)
    for a, b in zip(first, second, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_explained_variance_counts_trained_tokens_alone():
    values, targets = jnp.array([[1.0, 2.0, 9.0]]), jnp.array([[1.0, 3.0, jnp.nan]])
    got = critic.explained_variance(values, targets, jnp.array([[1.0, 1.0, 0.0]]))
    np.testing.assert_allclose(got, 1 - 0.25 / 1.0)  # errors 0 and 1, targets 1 and 3


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(ValueError, match="lowest and the highest"):
        critic.CriticConfig(bounds=(1.0, 0.0))
