"""Critic losses against reference cases; the head that cannot leave its range."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.losses import algorithms as A
from rljax.testing import check_loss

CASES = json.loads((Path(__file__).parents[1] / "golden" / "returns.json").read_text())["cases"]
GOLDEN = {case["name"]: case for case in CASES}


def test_the_bounded_head_equals_the_reference():
    case = GOLDEN["bounded_value_atan"]
    raw = jnp.asarray(case["inputs"]["raw"])
    low, high = case["hyperparameters"]["r_min"], case["hyperparameters"]["r_max"]

    def head(x):
        return L.bounded(x, low, high)

    np.testing.assert_allclose(head(raw), case["expected"]["values"], rtol=1e-6)
    slope = jax.vmap(jax.vmap(jax.grad(head)))(raw)
    np.testing.assert_allclose(slope, case["expected"]["d_value_d_raw"], rtol=1e-5)
    far = head(jnp.array([-1e30, 1e30]))
    assert low <= far[0] and far[1] <= high and np.all(np.isfinite(far))


@pytest.mark.parametrize("name", ["value_loss_plain", "value_loss_clipped"])
def test_the_critics_loss_equals_the_reference(name):
    case = GOLDEN[name]
    inputs = {k: jnp.asarray(v) for k, v in case["inputs"].items()}
    hyper = case["hyperparameters"]
    loss = A.critic(hyper["clip"])
    batch = L.Batch(
        mask=inputs["mask"], value=inputs["old_values"], value_target=inputs["targets"],
        advantage=jnp.zeros_like(inputs["mask"]),
    )  # fmt: skip

    @jax.jit
    def run(raw):
        prepared, state = loss.prepare(batch, loss.init(batch))

        def total(raw):
            values = L.bounded(raw, hyper["r_min"], hyper["r_max"])
            return loss(jnp.zeros_like(raw), prepared, state, value_live=values)[0]

        return jax.value_and_grad(total)(raw)

    value, gradient = run(inputs["raw"])
    np.testing.assert_allclose(value, case["expected"]["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, case["expected_gradient"]["value"], rtol=1e-4, atol=1e-7)


def test_huber_is_squared_near_the_target_and_linear_far_from_it():
    # Huber's definition: d^2 / 2 for |d| <= delta, delta (|d| - delta / 2) beyond.
    loss = L.chain(L.value_huber(0.5), L.token_sum())
    values = jnp.array([[0.3, -0.5, 2.0, -3.0]])
    batch = L.Batch(
        mask=jnp.ones((1, 4)), advantage=jnp.zeros((1, 4)), value_target=jnp.zeros((1, 4))
    )
    batch, state = loss.prepare(batch, loss.init(batch))
    value, gradient = jax.value_and_grad(
        lambda v: loss(jnp.zeros((1, 4)), batch, state, value_live=v)[0]
    )(values)
    np.testing.assert_allclose(value, 0.045 + 0.125 + 0.5 * 1.75 + 0.5 * 2.75, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.3, -0.5, 0.5, -0.5]], rtol=1e-6)


def test_critic_losses_keep_the_contract_of_a_chain():
    check_loss(A.critic(clip=0.3))
    # Beside the policy, in one chain: its gradient flows through the live values alone.
    check_loss(
        L.chain(L.gae(), L.token_ratio(), L.clip_ratio(), L.value_huber(0.5, 0.1), L.token_mean())
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: L.value_squared(clip=0.0), "clip=0.0 of value_squared"),
        (lambda: L.value_squared(coefficient=-1.0), "coefficient=-1.0"),
        (lambda: L.value_huber(0.0), "delta=0.0 of value_huber"),
    ],
)
def test_bad_settings_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_critic_without_values_says_what_is_missing():
    batch = L.Batch(mask=jnp.ones((1, 2)), advantage=jnp.zeros((1, 2)))
    with pytest.raises(ValueError, match="put a returns member"):
        A.critic().prepare(batch, A.critic().init(batch))
