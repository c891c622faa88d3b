"""`check_loss` passes sound losses and says what is wrong with others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.losses.base import LossTransform
from rljax.testing import check_loss


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def soft_gate(tau: float) -> L.LossTransform:
    """A smooth gate around ratio 1 in place of a hard clip."""

    def fn(t, b):
        return t.replace(g=4.0 / tau * jax.nn.sigmoid(tau * (jnp.exp(t.log_ratio) - 1.0)))

    return L.on_terms(fn)


def test_a_researcher_s_own_transform_passes():
    loss = L.chain(
        L.leave_one_out(),
        L.token_ratio(),
        soft_gate(tau=4.0),
        L.kl_to_reference(0.01),
        L.token_mean(),
    )
    check_loss(loss)


def test_a_stateful_transform_passes():
    def prepare(batch, mean):
        advantage = (batch.reward - mean)[:, None] * batch.mask
        return batch.replace(advantage=advantage), 0.9 * mean + 0.1 * jnp.mean(batch.reward)

    running = LossTransform(
        init=lambda batch: jnp.zeros(()),
        prepare=prepare,
        needs=frozenset({"reward"}),
        gives=frozenset({"advantage"}),
    )
    check_loss(L.chain(running, L.token_mean()))


def terms(fn, **names):
    return lambda: L.chain(L.nll(), L.on_terms(fn, **names), L.token_mean())


def batch(fn):
    return lambda: L.chain(L.nll(), L.on_batch(fn, gives=["weight"]))


def state(init, prepare=lambda batch, state: (batch, state)):
    return lambda: L.chain(L.nll(), LossTransform(init=init, prepare=prepare), L.token_mean())


def centre_in_update(t, b):
    return t.replace(g=t.g - jax.lax.stop_gradient(jnp.mean(t.g)))


def count_in_update(t, b):
    return t.measured("length", jnp.sum(b.mask, axis=1) / len(b.mask), jnp.ones(len(b.mask)))


def step_state(batch, state):
    return batch, state + 1


BROKEN = {
    "a mean in update": (terms(centre_in_update), "microbatches: give value"),
    "a metric that is a mean": (terms(count_in_update), "another metric length"),
    "an unnamed need": (terms(lambda t, b: t.replace(extra=t.extra + b.logp_ref)), "needs: "),
    "an unnamed live array": (
        terms(lambda t, b: t.replace(extra=t.extra + t.live.get("entropy") * 2)),
        "needs: ",
    ),
    "a Python branch on data": (
        terms(lambda t, b: t if jnp.sum(t.g) > 0 else t.replace(g=-t.g)),
        "jit: ",
    ),
    "a log of a zero": (
        terms(lambda t, b: t.replace(extra=jnp.log(0.0 * t.logp))),
        "finite: ",
    ),
    "a double gradient": (terms(lambda t, b: t.replace(g=2.0 * t.g)), "ratio 1: .*on_policy=False"),
    "an exp without a clamp": (
        terms(lambda t, b: t.replace(extra=jnp.exp(-t.logp) - 1.0)),
        "extremes: log ratios",
    ),
    "a half-precision weight": (
        batch(lambda b: b.replace(weight=b.mask.astype(jnp.bfloat16))),
        "dtype: ",
    ),
    "a mean over no tokens": (
        state(lambda b: jnp.zeros(()), lambda b, s: (b, s + jnp.sum(b.mask**2) / jnp.sum(b.mask))),
        "all masked: ",
    ),
    "a Python number as state": (state(lambda batch: 0.0), "state: .*float"),
    "a state that changes its type": (
        state(lambda batch: jnp.zeros((), jnp.int32), lambda b, s: (b, s * 1.0)),
        "no retrace: ",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_loss_is_told_which_property_it_breaks(name):
    make, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        check_loss(make())


def test_the_chain_itself_guards_against_zeros_and_garbage_under_the_mask():
    # log(0) at masked tokens in value and gradient, a weight of 0/0 without any token.
    log = L.on_terms(lambda t, b: t.replace(extra=jnp.log(-t.logp)))
    mean = L.on_batch(lambda b: b.replace(weight=b.mask / jnp.sum(b.mask)), gives=["weight"])
    check_loss(L.chain(L.nll(), log, mean), on_policy=False)


def test_the_property_at_ratio_one_can_be_left_out():
    check_loss(terms(lambda t, b: t.replace(g=2.0 * t.g))(), on_policy=False)


def test_an_incomplete_chain_and_an_odd_batch_are_refused():
    with pytest.raises(ValueError, match="no aggregate"):
        check_loss(L.chain(L.nll()))
    with pytest.raises(ValueError, match="9 rows"):
        check_loss(L.algorithms.sft(), L.Batch(mask=jnp.ones((9, 2))))


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from rljax import losses as L
from rljax.testing import check_loss
assert jax.device_count() == 8
jax.config.update("jax_disable_most_optimizations", True)
for name in ("dapo", "gspo", "reinforce_pp_baseline"):
    check_loss(L.algorithms.ALGORITHMS[name](kl=0.1))
# One token with gradient 1 on the first device, nine without on the others: 1/10 everywhere.
mask = np.zeros((8, 2), np.float32)
mask[0, 0], mask[1:, 0], mask[1:3, 1] = 1, 1, 1
loss = L.chain(L.nll(), L.token_mean())
def value(x, batch):
    batch, state = loss.prepare(batch, loss.init(batch))
    return loss(-x * (jnp.arange(8) == 0)[:, None] * jnp.ones((8, 2)), batch, state)[0]
for count in (1, 2, 4, 8):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("rows",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    batch = jax.device_put(L.Batch(mask=jnp.asarray(mask)), spec)
    print(float(jax.jit(jax.grad(value))(1.0, batch)))
"""


def test_eight_devices_agree_with_one():
    # prime-rl#2358: the mean of per-rank means gave 0.5. A process of its own has 8 CPU devices.
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | flags,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    np.testing.assert_allclose([float(x) for x in run.stdout.split()], [0.1] * 4, rtol=1e-6)
