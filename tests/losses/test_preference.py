"""Preference losses against their papers' formulas in plain numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.losses import algorithms as A
from rljax.testing import check_loss

LENGTHS = np.array([5, 3, 1, 4, 2, 2])  # three pairs
MASK = (np.arange(5) < LENGTHS[:, None]).astype(np.float32)
MASK[0, 1] = 0.0  # text that a tool wrote
RNG = np.random.default_rng(0)
LOGP, REF, OLD = (RNG.uniform(-3.0, -0.2, MASK.shape).astype(np.float32) for _ in range(3))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def sums(x):
    return (x.astype(np.float64) * MASK).sum(1)


def means(x):
    return sums(x) / MASK.sum(1)


def odds(x):
    return x - np.log(1.0 - np.exp(x))


def run(loss: L.LossTransform, logp=LOGP, **fields):
    """(value, gradient, metrics) of a whole batch; what stands under the mask is NaN."""
    given = {"mask": MASK, "logp_ref": REF, **fields}
    spoiled = {
        k: np.where(MASK > 0, x, np.nan) if k.startswith("logp") else x for k, x in given.items()
    }
    batch = L.Batch(**jax.tree.map(jnp.asarray, spoiled))

    @jax.jit
    def go(logp, batch):
        batch, state = loss.prepare(batch, loss.init(batch))
        return jax.value_and_grad(lambda x: loss(x, batch, state), has_aux=True)(logp)

    (value, metrics), gradient = jax.device_get(go(jnp.asarray(logp), batch))
    return float(value), np.asarray(gradient), {k: float(m.mean) for k, m in metrics.items()}


RATIO = sums(LOGP) - sums(REF)
H = RATIO[0::2] - RATIO[1::2]
MEAN = means(LOGP)
GAP = MEAN[0::2] - MEAN[1::2]
ODDS = odds(MEAN)[0::2] - odds(MEAN)[1::2]
FORMULAS = {
    "dpo": (A.dpo(0.3), -np.log(sigmoid(0.3 * H))),
    "dpo smoothed": (
        A.dpo(0.3, 0.1), -0.9 * np.log(sigmoid(0.3 * H)) - 0.1 * np.log(sigmoid(-0.3 * H))
    ),
    "ipo": (A.ipo(0.3), (H - 1 / 0.6) ** 2),
    "simpo": (A.simpo(2.0, 0.5), -np.log(sigmoid(2.0 * GAP - 0.5))),
    "orpo": (A.orpo(0.7), -MEAN[0::2] - 0.7 * np.log(sigmoid(ODDS))),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_pair_losses_equal_their_formula(name):
    loss, wanted = FORMULAS[name]
    value, gradient, metrics = run(loss)
    np.testing.assert_allclose(value, wanted.mean(), rtol=1e-5)
    assert np.all(gradient[MASK == 0] == 0) and np.all(gradient[MASK > 0] != 0)
    differences = H if "logp_ref" in loss.needs else GAP
    np.testing.assert_allclose(metrics["preference/margin"], differences.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["preference/accuracy"], (differences > 0).mean())


def test_the_gradient_of_dpo_is_that_of_the_paper():
    # Section 4: -beta sigmoid(-beta h) (grad log pi chosen - grad log pi rejected), mean of pairs.
    _, gradient, _ = run(A.dpo(0.3))
    pull = np.repeat(0.3 * sigmoid(-0.3 * H) / 3, 2) * np.array([-1, 1] * 3)
    np.testing.assert_allclose(gradient, pull[:, None] * MASK, rtol=1e-4)


def test_kto_equals_its_formula_and_its_reference_point_has_no_gradient():
    reward = np.array([1, 1, 0, 0, 1, 1], np.float32)
    value, gradient, metrics = run(A.kto(0.3, 1.0, 1.5), logp_old=OLD, reward=reward)
    z = max(0.0, (sums(OLD) - sums(REF))[1::2].mean())
    r = RATIO[0::2]
    wanted = [
        1.0 * (1 - sigmoid(0.3 * (r[0] - z))),
        1.5 * (1 - sigmoid(0.3 * (z - r[1]))),
        1.0 * (1 - sigmoid(0.3 * (r[2] - z))),
    ]
    np.testing.assert_allclose(value, np.mean(wanted), rtol=1e-5)
    np.testing.assert_allclose(metrics["preference/kl"], z, rtol=1e-5)
    np.testing.assert_allclose(metrics["preference/desired"], (r[0] + r[2]) / 2, rtol=1e-5)
    assert np.all(gradient[1::2] == 0) and np.all((gradient[0::2] != 0) == (MASK[0::2] > 0))
    assert np.all(gradient[0] <= 0) and np.all(gradient[2] >= 0)


def test_the_reference_point_of_kto_is_not_negative():
    _, _, metrics = run(A.kto(), logp_old=REF - 1.0, reward=np.ones(6, np.float32))
    assert metrics["preference/kl"] == 0.0


def test_scores_are_compared_at_the_last_token():
    value_live = RNG.normal(size=MASK.shape).astype(np.float32)
    rating = np.array([3, 1, 2, 2, 1, 0], np.float32)
    loss = A.reward_model(margin=0.5, centring=0.1)
    batch = L.Batch(mask=jnp.asarray(MASK), reward=jnp.asarray(rating))
    batch, state = loss.prepare(batch, loss.init(batch))

    def go(v):
        return loss(jnp.zeros(MASK.shape), batch, state, value_live=v)[0]

    value, gradient = jax.value_and_grad(go)(jnp.asarray(value_live))
    r = value_live[np.arange(6), LENGTHS - 1].astype(np.float64)
    c, j = r[0::2], r[1::2]
    wanted = -np.log(sigmoid(c - j - 0.5 * np.array([2, 0, 1]))) + 0.1 * (c + j) ** 2
    np.testing.assert_allclose(value, wanted.mean(), rtol=1e-5)
    last = np.arange(5) == LENGTHS[:, None] - 1
    assert np.all((np.asarray(gradient) != 0) == last)


def test_a_pair_with_an_empty_response_counts_for_nothing():
    mask = MASK.copy()
    mask[3] = 0.0  # of the second pair
    value, gradient, metrics = run(A.dpo(0.3), mask=mask)
    np.testing.assert_allclose(value, -np.log(sigmoid(0.3 * H[[0, 2]])).mean(), rtol=1e-5)
    assert np.all(gradient[2:4] == 0)
    np.testing.assert_allclose(metrics["preference/margin"], H[[0, 2]].mean(), rtol=1e-5)


@pytest.mark.parametrize("name", A.PREFERENCES)
def test_every_preference_loss_keeps_the_contract(name):
    check_loss(A.PREFERENCES[name]())


def test_the_other_losses_keep_the_contract():
    check_loss(A.reward_model(0.5, 0.01))
    check_loss(A.distil())


def test_what_is_no_pair_and_settings_out_of_range_are_refused():
    loss = A.dpo()
    batch = L.Batch(mask=jnp.ones((3, 2)), logp_ref=jnp.zeros((3, 2)))
    with pytest.raises(ValueError, match="3 rows are not pairs"):
        loss.prepare(batch, loss.init(batch))
    for make in (
        lambda: A.dpo(beta=0.0),
        lambda: A.dpo(smoothing=0.5),
        lambda: A.ipo(-1.0),
        lambda: A.orpo(0.0),
        lambda: A.kto(beta=float("inf")),
        lambda: A.reward_model(centring=-1.0),
    ):
        with pytest.raises(ValueError):
            make()
