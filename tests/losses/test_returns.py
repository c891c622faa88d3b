"""Returns against reference cases, plain loops, and the text that a tool wrote in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.losses import returns
from rljax.testing import check_loss

CASES = json.loads((Path(__file__).parents[1] / "golden" / "returns.json").read_text())["cases"]
NAMES = ("gae_lambda_0p95", "lagae_alpha_0p4_clamped")  # the unclamped one is not ours
TOKENS = [c for c in CASES if c["name"] in NAMES]
AGENTS = [c for c in CASES if c["name"].startswith("gae/")]


def prepared(member: L.LossTransform, **fields: Any) -> Any:
    loss = L.chain(member, L.token_mean())
    batch = L.Batch(**{k: jnp.asarray(v, jnp.float32) for k, v in fields.items()})
    return jax.jit(lambda b: loss.prepare(b, loss.init(b))[0])(batch)


def member_of(hyper: dict) -> L.LossTransform:
    if "lam" in hyper:
        return L.gae(hyper["gamma"], hyper["lam"], target_lambda=1.0)
    return L.length_adaptive_gae(hyper["alpha"], hyper["gamma"])


@pytest.mark.parametrize("case", TOKENS, ids=lambda c: c["name"])
def test_advantages_and_targets_equal_the_reference(case):
    inputs, expected = case["inputs"], case["expected"]
    mask = np.asarray(inputs["mask"])
    out = prepared(
        member_of(case["hyperparameters"]),
        mask=mask, value=inputs["values"], token_reward=inputs["token_rewards"],
        reward=np.zeros(len(mask)),
    )  # fmt: skip
    np.testing.assert_allclose(out.advantage, expected["advantages"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.value_target, expected["mc_targets"], rtol=1e-5, atol=1e-6)
    if "lambda" in expected:
        got = returns.adaptive_lambda(jnp.asarray(mask), case["hyperparameters"]["alpha"])
        np.testing.assert_allclose(got, expected["lambda"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", AGENTS, ids=lambda c: c["name"])
def test_length_adaptive_advantages_equal_the_second_reference(case):
    arrays = {**case["inputs"], **case["outputs"]}
    arrays = {k: np.asarray(v["data"], float).reshape(v["shape"]) for k, v in arrays.items()}
    out = prepared(
        L.length_adaptive_gae(case["config"]["alpha"]),
        mask=arrays["mask"], value=arrays["values"], token_reward=arrays["rewards"],
        reward=np.zeros(3),
    )  # fmt: skip
    np.testing.assert_allclose(out.advantage, arrays["advantages"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.value_target, arrays["mc_returns"], rtol=1e-5, atol=1e-6)


MEMBERS = {
    "gae": L.gae(0.9, 0.8),
    "target": L.gae(0.9, 0.8, target_lambda=0.3),
    "adaptive": L.length_adaptive_gae(0.7, 0.9),
    "monte_carlo": L.monte_carlo(0.9),
    "returns": L.returns_to_go(0.9),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_text_of_a_tool_is_stepped_over(name):
    # FC18, FC19: as if the columns under mask 0 were not there, whatever they hold.
    compact = {"mask": [[1, 1, 1, 1]], "value": [[0.3, 0.5, 0.1, 0.9]], "reward": [1.0]}
    compact["token_reward"] = [[0.1, 0, -0.2, 0]]
    places = [0, 1, 4, 6]
    spread: dict[str, Any] = {"reward": [1.0]}
    for field in ("mask", "value", "token_reward"):
        row = np.full((1, 8), 0.0 if field == "mask" else np.nan)
        row[0, places] = compact[field][0]
        spread[field] = row
    one, two = prepared(MEMBERS[name], **compact), prepared(MEMBERS[name], **spread)
    for field in ("advantage", "value_target"):
        if getattr(one, field) is not None:
            got = np.asarray(getattr(two, field))
            np.testing.assert_allclose(got[:, places], getattr(one, field), rtol=1e-6)
            assert np.all(np.delete(got, places, axis=1) == 0)


@pytest.mark.parametrize("gamma", [0.9, 0.0])
def test_the_reward_sits_on_the_last_trained_token(gamma):
    # FC19, mask [1, 1, 0, 0], reward 1, values 0: gamma lambda of one token, not of three.
    out = prepared(
        L.gae(gamma, 0.9), mask=[[1, 1, 0, 0]], value=np.zeros((1, 4)), reward=[1.0]
    )  # fmt: skip
    np.testing.assert_allclose(out.advantage, [[0.9 * gamma, 1.0, 0, 0]], rtol=1e-6)


def test_lambda_one_is_the_return_and_lambda_zero_one_step():
    rng = np.random.default_rng(0)
    mask = (np.arange(5) < np.array([5, 3, 1])[:, None]).astype(float)
    value, reward = rng.normal(size=(3, 5)), rng.normal(size=3)
    given = {"mask": mask, "value": value, "reward": reward}
    whole = prepared(L.gae(1.0, 1.0), **given)
    np.testing.assert_allclose(whole.value_target, mask * reward[:, None], rtol=1e-5, atol=1e-6)
    step = prepared(L.gae(0.9, 0.0), **given)
    for b, n in enumerate([5, 3, 1]):
        for t in range(n):
            after = 0.9 * value[b, t + 1] if t + 1 < n else reward[b]
            np.testing.assert_allclose(step.advantage[b, t], after - value[b, t], rtol=1e-4)
    same = prepared(L.monte_carlo(), **given)
    np.testing.assert_array_equal(same.advantage, whole.advantage)


def test_a_missing_reward_leaves_its_row_out():
    out = prepared(L.gae(), mask=np.ones((2, 2)), value=np.ones((2, 2)), reward=[np.nan, 1.0])
    np.testing.assert_array_equal(out.mask, [[0, 0], [1, 1]])
    assert np.all(np.isfinite(out.advantage)) and np.all(out.advantage[0] == 0)


# KL in the reward


def penalised(loss: L.LossTransform, state: Any, mask: Any, sampler: Any, ref: Any) -> Any:
    batch = L.Batch(
        mask=jnp.asarray(mask), reward=jnp.ones(len(mask)), value=jnp.zeros(mask.shape),
        logp_sampler=jnp.asarray(sampler), logp_ref=jnp.asarray(ref),
    )  # fmt: skip
    return loss.prepare(batch, loss.init(batch) if state is None else state)


def test_the_kl_penalty_enters_the_return():
    mask = np.array([[1.0, 0.0, 1.0]])
    gap = np.array([[0.5, np.nan, -0.2]])
    loss = L.chain(L.kl_in_reward(0.1), L.gae(1.0, 1.0), L.token_mean())
    out, _ = penalised(loss, None, mask, np.full((1, 3), -1.0), -1.0 - gap)
    np.testing.assert_allclose(out.token_reward, [[-0.05, 0, 0.02]], atol=1e-7)
    np.testing.assert_allclose(out.advantage, [[0.97, 0, 1.02]], rtol=1e-6)


def test_the_coefficient_steers_towards_the_target():
    # Two responses of KL 3 and 1 nats, mean 2: target 1 gives the largest error, 0.2; target 4 the
    # smallest, -0.2; target 2.1 something between.
    mask, gap = np.ones((2, 2), np.float32), np.array([[1.0, 2.0], [0.5, 0.5]])
    for target, factor in [(1.0, 1.02), (4.0, 0.98), (2.1, 1 + 0.1 * (2 / 2.1 - 1))]:
        loss = L.chain(L.kl_in_reward(0.1, target=target), L.gae(), L.token_mean())
        first, state = penalised(loss, None, mask, np.zeros((2, 2)), -gap)
        np.testing.assert_allclose(first.token_reward, -0.1 * gap, rtol=1e-6)
        np.testing.assert_allclose(state[0], 0.1 * factor, rtol=1e-6)
        second, _ = penalised(loss, state, mask, np.zeros((2, 2)), -gap)
        np.testing.assert_allclose(second.token_reward, -0.1 * factor * gap, rtol=1e-6)
        _, idle = penalised(loss, state, 0 * mask, np.zeros((2, 2)), -gap)
        assert idle[0] == state[0]


def test_returns_keep_the_contract_of_a_chain():
    check_loss(
        L.chain(L.kl_in_reward(0.1, target=2.0), L.gae(0.9, 0.8, 1.0), L.whiten(), L.token_mean())
    )
    check_loss(L.chain(L.monte_carlo(), L.token_ratio(), L.clip_ratio(), L.token_mean()))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: L.gae(lambda_=1.5), "lambda_=1.5 of gae"),
        (lambda: L.gae(target_lambda=-1.0), "target_lambda=-1.0 of gae"),
        (lambda: L.length_adaptive_gae(0.0), "alpha=0.0"),
        (lambda: L.monte_carlo(2.0), "gamma=2.0 of monte_carlo"),
        (lambda: L.kl_in_reward(-1.0), "coefficient=-1.0"),
        (lambda: L.kl_in_reward(target=0.0), "cannot steer"),
        (lambda: L.kl_in_reward(kind="k9"), "k9"),  # pyright: ignore[reportArgumentType]
        (lambda: L.kl_in_reward(anchor="reference"), "sampler"),
    ],
)
def test_bad_settings_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_penalty_after_the_advantage_is_refused():
    loss = L.chain(L.gae(), L.kl_in_reward(), L.token_mean())
    with pytest.raises(ValueError, match="before gae"):
        penalised(loss, None, np.ones((1, 2), np.float32), np.zeros((1, 2)), np.zeros((1, 2)))
