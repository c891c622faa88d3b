"""Chains: order, needs and messages; masks and missing values; state."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L

MASK = jnp.asarray([[1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0, 0, 0]])
LOGP = jnp.linspace(-2.0, -0.1, 15).reshape(3, 5)


def full_batch(**changes) -> L.Batch:
    fields = {
        "mask": MASK,
        "reward": jnp.asarray([1.0, 0.0, 0.5]),
        "group": jnp.asarray([4, 4, 4], jnp.int32),
        "logp_old": LOGP - 0.1,
        "logp_ref": LOGP + 0.2,
    }
    return L.Batch(**(fields | changes))


def evaluate(loss: L.LossTransform, batch: L.Batch, logp=LOGP, **live):
    """(value, metrics), gradient of a raw batch."""

    @jax.jit
    def run(logp, raw):
        batch, state = loss.prepare(raw, loss.init(raw))
        return jax.value_and_grad(lambda x: loss(x, batch, state, **live), has_aux=True)(logp)

    return run(logp, batch)


def test_a_block_in_a_chain_equals_its_members():
    block = L.chain(L.token_ratio(), L.clip_ratio())
    nested = L.chain(L.leave_one_out(), L.chain(block, L.kl_to_reference(0.1)), L.token_mean())
    flat = L.chain(
        L.leave_one_out(),
        L.token_ratio(),
        L.clip_ratio(),
        L.kl_to_reference(0.1),
        L.token_mean(),
    )
    names = ["leave_one_out", "token_ratio", "clip_ratio", "kl_to_reference", "token_mean"]
    assert [m.name for m in nested.members] == names == [m.name for m in flat.members]
    assert nested.needs == {"reward", "group", "group>1", "logp_old", "logp_ref"} == flat.needs
    ((a, _), da), ((b, _), db) = evaluate(nested, full_batch()), evaluate(flat, full_batch())
    assert a == b and jnp.all(da == db)


def test_needs_lists_only_what_the_caller_must_bring():
    assert L.chain(L.token_ratio("sampler"), L.token_mean()).needs == {"logp_sampler", "advantage"}
    assert L.chain(L.nll(), L.token_mean()).needs == set()
    assert L.chain(L.token_ratio(), L.clip_ratio()).needs == {"logp_old"}
    assert L.chain(L.clip_ratio(), L.entropy_bonus(0.1)).needs == {"ratio", "entropy"}


@pytest.mark.parametrize(
    ("members", "facts"),
    [
        ((L.clip_ratio(), L.token_ratio()), ("clip_ratio reads the ratio", "before clip_ratio")),
        ((L.token_mean(), L.token_sum()), ("token_mean and token_sum both write the weight",)),
        ((L.token_ratio(), L.geometric_ratio()), ("both write the ratio",)),
        ((L.group_centre(), L.leave_one_out()), ("both write the advantage",)),
        ((L.whiten(), L.group_centre()), ("both write the advantage",)),
        ((L.token_mean(), L.drop_truncated()), ("token_mean reads the mask",)),
    ],
)
def test_members_in_a_wrong_order_are_refused_when_joined(members, facts):
    with pytest.raises(ValueError) as error:
        L.chain(*members)
    assert all(fact in str(error.value) for fact in facts)


def test_two_modifiers_of_one_thing_may_follow_each_other():
    L.chain(L.drop_flat_groups(), L.drop_truncated(), L.token_mean())
    L.chain(L.group_centre(), L.whiten(), L.whiten())


@pytest.mark.parametrize(
    ("loss", "facts"),
    [
        (L.chain(L.leave_one_out()), ("chain(leave_one_out) has no aggregate", "token_mean()")),
        (L.chain(L.leave_one_out(), L.dual_clip(), L.token_sum()), ("dual_clip needs `ratio`",)),
        (L.chain(L.token_ratio(), L.token_mean()), ("needs `advantage`", "group_centre()")),
        (L.chain(L.whiten(), L.token_mean()), ("whiten needs `advantage`",)),
        (L.chain(L.nll(), L.token_ratio("sampler"), L.token_sum()), ("decode engine recorded",)),
        (L.chain(L.overlong(9, 3), L.nll(), L.token_mean()), ("overlong needs `length`",)),
    ],
)
def test_what_the_batch_lacks_is_named_with_its_remedy(loss, facts):
    with pytest.raises(ValueError) as error:
        evaluate(loss, full_batch())
    assert all(fact in str(error.value) for fact in facts)


def test_a_call_checks_what_the_call_brings():
    loss = L.chain(L.nll(), L.entropy_bonus(0.1), L.token_mean())
    batch, state = loss.prepare(full_batch(), loss.init(full_batch()))
    with pytest.raises(ValueError, match=r"entropy_bonus needs `entropy`.*pass entropy="):
        loss(LOGP, batch, state)
    with pytest.raises(ValueError, match="not prepared"):
        loss(LOGP, full_batch(), state, entropy=LOGP)
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        loss(LOGP[:, :4], batch, state, entropy=LOGP)


def test_a_transform_that_was_not_called_is_pointed_out():
    with pytest.raises(TypeError, match=r"member 1 .* call it: token_mean\(\.\.\.\)"):
        L.chain(L.nll(), L.token_mean)  # pyright: ignore[reportArgumentType]


def test_a_custom_transform_is_called_by_its_maker_in_messages():
    def soft(tau):
        return L.on_terms(lambda t, b: t.replace(g=t.g * tau))

    def fn(t, b):
        return t

    assert soft(1.0).name.endswith("soft")
    assert L.on_terms(fn).name.endswith("in_messages")
    assert L.on_batch(lambda b: b, name="mine").name == "mine"


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_lies_under_the_mask_is_not_read(garbage):
    # SkyRL#1633: 0 * NaN under the mask poisoned the loss.
    mask = jnp.asarray([[1.0, 0.0]])
    old, bad = jnp.asarray([[-1.5, -1.0]]), jnp.asarray([[-1.0, garbage]])
    loss = L.chain(L.token_ratio(), L.clip_ratio(), L.kl_to_reference(0.5, "k3"), L.token_mean())
    results = []
    for logp, other in ((jnp.asarray([[-1.0, -1.0]]), old), (bad, bad.at[0, 0].set(-1.5))):
        batch = L.Batch(mask=mask, advantage=other + 2, logp_old=other, logp_ref=other)
        results.append(evaluate(loss, batch, logp))
    (clean, _), grad = results[0]
    (value, metrics), gradient = results[1]
    assert value == clean and jnp.isfinite(value)
    assert jnp.all(gradient == grad) and gradient[0, 1] == 0
    assert metrics["kl/reference"].weight == 1 and metrics["tokens/nonfinite"].sum == 0


@pytest.mark.parametrize("field", ["logp", "logp_old"])
def test_a_token_without_a_finite_log_prob_counts_below_the_line_only(field):
    loss = L.chain(L.nll(), L.token_ratio(), L.token_mean())
    logp, old = LOGP, LOGP
    if field == "logp":
        logp = logp.at[0, 1].set(-jnp.inf)
    else:
        old = old.at[0, 1].set(jnp.nan)
    (value, metrics), gradient = evaluate(loss, full_batch(logp_old=old), logp)
    assert gradient[0, 1] == 0 and jnp.all(jnp.isfinite(gradient))
    np.testing.assert_allclose(value, -7 / 8, rtol=1e-6)  # 7 of the 8 trained tokens, ratio 1
    assert metrics["tokens/nonfinite"].sum == 1 and metrics["tokens/nonfinite"].weight == 8


def test_a_token_without_a_finite_log_prob_does_not_spoil_its_sequence():
    loss = L.chain(L.nll(), L.geometric_ratio(), L.token_sum())
    old = (LOGP - 0.1).at[0, 1].set(jnp.nan)
    (value, metrics), gradient = evaluate(loss, full_batch(logp_old=old))
    np.testing.assert_allclose(value, -7 * np.exp(0.1), rtol=1e-5)
    np.testing.assert_allclose(gradient[0, 0], -np.exp(0.1), rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio/mean"].mean, np.exp(0.1), rtol=1e-5)


def test_a_non_finite_log_prob_that_no_member_reads_does_not_matter():
    loss = L.chain(L.nll(), L.token_mean())
    (value, metrics), _ = evaluate(loss, full_batch(logp_sampler=LOGP.at[0, 1].set(jnp.nan)))
    np.testing.assert_allclose(value, -jnp.sum(LOGP * MASK) / 8, rtol=1e-6)
    assert metrics["tokens/nonfinite"].sum == 0


def test_a_response_without_a_reward_is_not_trained_on():
    loss = L.chain(L.leave_one_out(), L.kl_to_reference(1.0), L.token_mean())
    (_, metrics), gradient = evaluate(loss, full_batch(reward=jnp.asarray([1.0, jnp.nan, 0.5])))
    assert jnp.all(gradient[1] == 0) and jnp.any(gradient[0] != 0)
    assert metrics["kl/reference"].weight == 5  # the tokens of rows 0 and 2


def test_the_mask_may_be_bool():
    loss = L.chain(L.nll(), L.token_mean())
    (a, _), _ = evaluate(loss, full_batch())
    (b, _), _ = evaluate(loss, full_batch(mask=MASK > 0))
    assert a == b


def test_state_changes_in_prepare_and_is_seen_by_update():
    def prepare(batch, baseline):
        advantage = (batch.reward - baseline)[:, None] * batch.mask
        return batch.replace(advantage=advantage), 0.5 * baseline + 0.5 * jnp.mean(batch.reward)

    def update(terms, batch, baseline):
        return terms.replace(extra=terms.extra + baseline)

    running = L.LossTransform(
        init=lambda batch: jnp.zeros(()),
        prepare=prepare,
        update=update,
        needs=frozenset({"reward"}),
        gives=frozenset({"advantage"}),
        name="running_baseline",
    )
    loss = L.chain(running, L.token_sum())
    batch = full_batch()
    prepared, state = loss.prepare(batch, loss.init(batch))
    value, _ = loss(jnp.zeros_like(LOGP), prepared, state)
    np.testing.assert_allclose(value, 8 * 0.25, rtol=1e-6)  # mean reward 0.5, half of it, 8 tokens
    prepared, state = loss.prepare(batch, state)
    assert prepared.advantage is not None
    np.testing.assert_allclose(prepared.advantage[0, 0], 1.0 - 0.25, rtol=1e-6)
    np.testing.assert_allclose(state[0], 0.375, rtol=1e-6)


def test_no_gradient_passes_through_advantage_or_weight():
    loss = L.chain(L.token_mean())

    def value(x):
        batch = full_batch(advantage=jnp.full_like(LOGP, x), weight=None)
        batch, state = loss.prepare(batch, loss.init(batch))
        return loss(LOGP, batch, state)[0]

    assert jax.grad(value)(2.0) == 0


def test_a_subclass_of_batch_may_carry_more_fields():
    class Marked(L.Batch):
        doubt: jax.Array | None = None  # [B, T]

    gate = L.on_terms(lambda t, b: t.replace(keep=t.keep * (b.doubt < 1)), needs=["doubt"])  # pyright: ignore
    loss = L.chain(L.nll(), gate, L.token_sum())
    doubt = jnp.zeros_like(MASK).at[0, 0].set(2.0).at[0, 4].set(jnp.nan)
    (value, _), _ = evaluate(loss, Marked(mask=MASK, doubt=doubt), -jnp.ones_like(MASK))
    assert value == 7
    with pytest.raises(ValueError, match="needs `doubt`"):
        evaluate(loss, Marked(mask=MASK))
