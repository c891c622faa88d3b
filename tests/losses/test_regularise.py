"""KL estimators by enumeration of a three-action policy; the entropy bonus."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.losses.regularise import KINDS

CASES = json.loads((Path(__file__).parents[1] / "golden" / "policy_losses.json").read_text())
GOLDEN = {case["name"]: case for case in CASES["cases"]}
LOGITS = jnp.asarray([0.3, -0.8, 1.1])
REFERENCE = jax.nn.log_softmax(jnp.asarray([-0.2, 0.9, 0.4]))
OLD = jax.nn.log_softmax(jnp.asarray([0.9, 0.1, -0.5]))


def expected(kind: str, logits, sampler=None, importance: bool = False):
    """E[KL term] over the sampler's three actions, one row an action; policy by default."""
    logp = jax.nn.log_softmax(logits)
    sampler = jax.lax.stop_gradient(logp if sampler is None else sampler)
    term = L.kl_to_reference(1.0, kind, importance=importance)  # pyright: ignore[reportArgumentType]
    loss = L.chain(L.token_ratio("sampler"), term, L.token_sum())
    batch = L.Batch(
        mask=jnp.ones((3, 1)),
        advantage=jnp.zeros((3, 1)),
        logp_ref=REFERENCE[:, None],
        logp_sampler=sampler[:, None],
    )
    batch, state = loss.prepare(batch, loss.init(batch))
    return loss(logp[:, None], batch.replace(weight=jnp.exp(sampler)[:, None]), state)[0]


def forward_kl(logits):
    logp = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logp) * (logp - REFERENCE))


def reverse_kl(logits):
    return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - jax.nn.log_softmax(logits)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_expected_gradient_is_the_one_the_docstring_claims(kind):
    # NeMo-RL#2506: exact gradients by enumeration of all actions.
    claimed = {
        "k1": jnp.zeros(3),
        "k2": jax.grad(forward_kl)(LOGITS),
        "k3": jax.grad(reverse_kl)(LOGITS),
    }
    gradient = jax.jit(jax.grad(lambda z: expected(kind, z)))(LOGITS)
    np.testing.assert_allclose(gradient, claimed.get(kind, claimed["k2"]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_the_expected_value_is_the_kl(kind):
    value = jax.jit(lambda z: expected(kind, z))(LOGITS)
    np.testing.assert_allclose(value, forward_kl(LOGITS), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_importance_weights_restore_the_policy_s_expectation_on_old_samples(kind):
    # trl#3025: in later updates the samples come from an older policy.
    fn = jax.jit(jax.value_and_grad(lambda z: expected(kind, z, OLD, importance=True)))
    wanted = jax.jit(jax.value_and_grad(lambda z: expected(kind, z)))(LOGITS)
    for a, b in zip(fn(LOGITS), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    plain = jax.jit(lambda z: expected(kind, z, OLD))(LOGITS)
    assert not np.allclose(plain, wanted[0], rtol=1e-2)


def test_the_importance_weight_needs_a_ratio():
    assert "ratio" in L.kl_to_reference(0.1, importance=True).needs
    assert "ratio" not in L.kl_to_reference(0.1).needs


@pytest.mark.parametrize("kind", ["k2", "k3", "k3+"])
def test_a_step_on_the_kl_alone_lowers_the_kl(kind):
    # SkyRL#1340: the KL was logged but had no gradient. Advantages are 0, coefficient 1.
    gradient = jax.jit(jax.grad(lambda z: expected(kind, z)))(LOGITS)
    assert jnp.linalg.norm(gradient) > 0.1
    assert forward_kl(LOGITS - 0.1 * gradient) < forward_kl(LOGITS)


@pytest.mark.parametrize("name", ["kl_k1", "kl_k2", "kl_k3_plus"])
def test_kl_terms_equal_the_reference(name):
    case = GOLDEN[name]
    inputs = {k: np.array(v) for k, v in case["inputs"].items()}
    kind, coefficient = case["hyperparameters"]["kind"], case["hyperparameters"]["coef"]
    loss = L.chain(L.kl_to_reference(coefficient, kind), L.token_mean())

    def pick(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logp, inputs["actions"][..., None], -1)[..., 0]

    @jax.jit
    def everything(logits):
        mask = jnp.asarray(inputs["mask"], jnp.float32)
        zeros, reference = jnp.zeros_like(mask), pick(inputs["ref_logits"])
        batch = L.Batch(mask=mask, advantage=zeros, logp_ref=reference)
        batch, state = loss.prepare(batch, loss.init(batch))
        by_logp = jax.grad(lambda x: loss(x, batch, state)[0])(pick(logits))
        fn = jax.value_and_grad(lambda z: loss(pick(z), batch, state), has_aux=True)
        return *fn(logits), by_logp

    (value, metrics), gradient, by_logp = jax.device_get(everything(inputs["logits"]))
    np.testing.assert_allclose(value, case["expected"]["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["kl/reference"].mean, value, rtol=1e-6)
    np.testing.assert_allclose(gradient, case["expected_gradient"]["value"], rtol=1e-4, atol=1e-6)
    wanted = np.array(case["expected"]["per_token_coefficient"]) / np.sum(inputs["mask"])
    np.testing.assert_allclose(by_logp, wanted, rtol=1e-4, atol=1e-6)


def test_the_entropy_bonus_equals_the_reference():
    case = GOLDEN["entropy_bonus"]
    mask = np.array(case["inputs"]["mask"], np.float32)
    loss = L.chain(L.entropy_bonus(case["hyperparameters"]["coef"]), L.token_mean())

    @jax.jit
    def run(logits):
        batch = L.Batch(mask=jnp.asarray(mask), advantage=jnp.zeros_like(mask))
        batch, state = loss.prepare(batch, loss.init(batch))

        def value(logits):
            logp = jax.nn.log_softmax(logits)
            entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
            return loss(logp[..., 0], batch, state, entropy=entropy)

        return jax.value_and_grad(value, has_aux=True)(logits)

    logits = np.array(case["inputs"]["logits"], np.float32)
    (value, metrics), gradient = jax.device_get(run(logits))
    np.testing.assert_allclose(value, case["expected"]["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, case["expected_gradient"]["value"], rtol=1e-4, atol=1e-8)
    wanted = np.sum(np.array(case["expected"]["entropy"]) * mask) / 3
    np.testing.assert_allclose(metrics["entropy"].mean, wanted, rtol=1e-5)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_coefficients_out_of_range_are_refused(value):
    for make in (L.kl_to_reference, L.entropy_bonus):
        with pytest.raises(ValueError, match="at least 0 and finite"):
            make(value)


def test_unknown_estimators_are_refused():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        L.kl_to_reference(0.1, "k4")  # pyright: ignore[reportArgumentType]
