"""Advantages against plain loops, closed forms and the faults other libraries had."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L

CASES = json.loads((Path(__file__).parents[1] / "golden" / "policy_losses.json").read_text())
GOLDEN = {case["name"]: case for case in CASES["cases"]}


def prepare(loss: L.LossTransform, **fields) -> L.Batch:
    """The prepared batch, as numpy."""
    kind = {"group": np.int32}
    arrays = {k: jnp.asarray(np.asarray(x, kind.get(k, np.float32))) for k, x in fields.items()}
    return jax.device_get(jax.jit(lambda b: loss.prepare(b, loss.init(b))[0])(L.Batch(**arrays)))


def advantages(member: L.LossTransform, reward, group, mask=None, **fields) -> np.ndarray:
    """[B] advantage of the first token of each response, or [B, T] where a mask is given."""
    full = np.ones((len(reward), 1)) if mask is None else mask
    loss = L.chain(member, L.token_sum())
    out = prepare(loss, mask=full, reward=reward, group=group, **fields).advantage
    assert out is not None
    return np.asarray(out if mask is not None else out[:, 0])


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("grpo_advantage_std", L.group_standardise(singleton="raw")),
        ("dr_grpo_advantage", L.group_centre(singleton="raw")),
        ("rloo_advantage", L.leave_one_out(singleton="raw")),
        ("flow_grpo_advantage_global_std", L.group_standardise(by="batch", eps=1e-8)),
        (
            "reinforce_pp_baseline_advantage",
            L.chain(L.group_centre(singleton="raw"), L.whiten()),
        ),
    ],
)
def test_advantages_equal_the_reference(name, member):
    inputs = GOLDEN[name]["inputs"]
    got = advantages(member, inputs["rewards"], inputs["group"])
    np.testing.assert_allclose(got, GOLDEN[name]["expected"]["advantages"], rtol=1e-5, atol=1e-6)


def test_returns_equal_the_reference():
    case = GOLDEN["reinforce_pp_advantage"]
    mask, rewards = case["inputs"]["mask"], case["inputs"]["token_rewards"]
    for member, name in (
        (L.returns_to_go(0.9), "returns"),
        (L.chain(L.returns_to_go(0.9), L.whiten()), "advantages"),
    ):
        got = advantages(member, [0.0, 0.0, 0.0], [0, 0, 0], mask, token_reward=rewards)
        np.testing.assert_allclose(got, case["expected"][name], rtol=1e-5, atol=1e-6)


def test_standardised_groups_equal_a_loop_in_any_row_order():
    # Plain numpy, two-pass std over n - 1; ids are no row numbers and rows are shuffled.
    rng = np.random.default_rng(3)
    group = rng.permutation(np.repeat([70, -5, 12], 4))
    reward = rng.normal(size=12)
    expected = np.zeros(12)
    for g in set(group):
        r = reward[group == g]
        expected[group == g] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(
        advantages(L.group_standardise(), reward, group), expected, rtol=1e-5, atol=1e-6
    )


def test_scale_by_group_batch_or_not_at_all():
    # trl#3992: the modes were swapped. Closed forms for [0,1,0,1] and [0,10,0,10].
    reward, group = [0.0, 1.0, 0.0, 1.0, 0.0, 10.0, 0.0, 10.0], [0] * 4 + [1] * 4
    centred = np.array([-0.5, 0.5, -0.5, 0.5, -5.0, 5.0, -5.0, 5.0])
    got = {
        "none": advantages(L.group_centre(), reward, group),
        "group": advantages(L.group_standardise(), reward, group),
        "batch": advantages(L.group_standardise(by="batch"), reward, group),
    }
    np.testing.assert_allclose(got["none"], centred, rtol=1e-6)
    unit = np.sqrt(3) / 2  # +-0.5 over a std of 1 / sqrt(3)
    np.testing.assert_allclose(np.abs(got["group"]), unit, rtol=1e-5)
    np.testing.assert_allclose(got["group"].reshape(2, 4).std(axis=1, ddof=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(got["batch"], centred / (np.std(reward, ddof=1)), rtol=1e-5)


def test_rounding_residue_is_not_taken_for_a_standard_deviation():
    # NeMo-RL#4161: seven rewards 0.35 and one 0.0, leave-one-out with std: thousands, not -0.35.
    got = advantages(L.leave_one_out(standardise=True), [0.35] * 7 + [0.0], [0] * 8)
    np.testing.assert_allclose(got[7], -0.35, rtol=1e-5)
    # The others: 0.35 against a mean of 0.3, std over the seven of which one is 0.0.
    others = np.array([0.35] * 6 + [0.0])
    np.testing.assert_allclose(got[:7], 0.05 / (others.std(ddof=1) + 1e-6), rtol=1e-5)


@pytest.mark.parametrize(
    "member",
    [
        L.group_centre(),
        L.group_standardise(),
        L.group_standardise(by="batch"),
        L.leave_one_out(),
        L.leave_one_out(standardise=True),
        L.chain(L.group_centre(), L.whiten()),
    ],
    ids=lambda member: member.name,
)
def test_equal_rewards_give_exactly_no_advantage(member):
    # In float32 the mean of seven 0.35 is not 0.35, nor is 0.1 + 0.2 equal to 0.3.
    reward = [*[0.35] * 7, *[1e4 + 0.1] * 7, 0.1 + 0.2, *[0.3] * 6]
    assert np.all(advantages(member, reward, np.arange(21) // 7) == 0)


def test_a_large_common_reward_does_not_swallow_the_differences():
    reward = np.array([1e4, 1e4 + 1, 1e4, 1e4 + 1])
    got = advantages(L.group_standardise(), reward, [0] * 4)
    np.testing.assert_allclose(np.abs(got), np.sqrt(3) / 2, rtol=1e-3)  # float32 at 1e4: 1e-3


def test_a_missing_reward_leaves_the_statistics_of_its_group_alone():
    got = advantages(L.leave_one_out(), [1.0, np.nan, 0.0, 0.5], [0, 0, 0, 0])
    np.testing.assert_allclose(got, [0.75, 0.0, -0.75, 0.0], atol=1e-6)


def test_a_response_alone_in_its_group_gets_nothing_unless_raw_is_asked_for():
    for make in (L.group_centre, L.group_standardise, L.leave_one_out):
        assert advantages(make(), [3.0, 0.0, 1.0], [0, 1, 1])[0] == 0
        np.testing.assert_allclose(advantages(make(singleton="raw"), [3.0], [0]), 3.0, rtol=1e-5)


def test_a_group_baseline_with_one_response_a_prompt_is_refused():
    # OpenRLHF#1250: it ran, with every advantage 0.
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp_baseline"):
        loss = L.algorithms.ALGORITHMS[name]()
        with pytest.raises(ValueError, match=r"(group|leave)\w+ .*one response.*2 or more"):
            L.check_groups(loss, 1)
        L.check_groups(loss, 2)
    for name in ("ppo", "reinforce", "reinforce_pp"):
        L.check_groups(L.algorithms.ALGORITHMS[name](), 1)


def test_flat_groups_move_weights_by_the_kl_alone_and_not_at_all_when_dropped():
    # trl#7068: with beta > 0 a zero-variance group still has a gradient; dropping is an option.
    mask = np.array([[1, 1], [1, 0], [1, 1], [1, 1]], np.float32)
    logp = np.full((4, 2), -1.0, np.float32)
    batch = L.Batch(
        mask=jnp.asarray(mask),
        reward=jnp.asarray([1.0, 1.0, 0.0, 1.0]),
        group=jnp.asarray([0, 0, 1, 1]),
        logp_ref=jnp.asarray(logp - 0.3),
    )

    def gradient(*first):
        loss = L.chain(*first, L.leave_one_out(), L.kl_to_reference(0.5, "k2"), L.token_mean())

        @jax.jit
        def run(logp, batch):
            batch, state = loss.prepare(batch, loss.init(batch))
            return jax.grad(lambda x: loss(x, batch, state)[0])(logp)

        return jax.device_get(run(logp, batch))

    kept, dropped = gradient(), gradient(L.drop_flat_groups())
    np.testing.assert_allclose(kept[:2], 0.5 * 0.3 * mask[:2] / 7, rtol=1e-5)  # beta d / tokens
    assert np.all(dropped[:2] == 0)
    wanted = (0.15 - np.array([[-1.0], [1.0]])) / 4 * np.ones((2, 2))
    np.testing.assert_allclose(dropped[2:], wanted, rtol=1e-5)


def test_dropped_groups_equal_the_reference():
    case = GOLDEN["dynamic_sampling_keep"]
    reward, group = case["inputs"]["rewards"], case["inputs"]["group"]
    loss = L.chain(L.drop_flat_groups(), L.group_centre(), L.token_mean())
    batch = prepare(loss, mask=np.ones((9, 2)), reward=reward, group=group)
    assert np.all(batch.mask == np.array(case["expected"]["keep"])[:, None])
    np.testing.assert_allclose(np.sum(batch.weight), 1.0, rtol=1e-6)  # pyright: ignore


def test_returns_run_over_trained_tokens_only():
    # verl#7278: the return was cut at a tool's text. Reward 1 on the last trained token.
    holes = advantages(L.returns_to_go(1.0), [1.0], [0], [[1, 1, 0, 0, 1, 1]])
    compact = advantages(L.returns_to_go(1.0), [1.0], [0], [[1, 1, 1, 1]])
    assert holes.tolist() == [[1, 1, 0, 0, 1, 1]] and compact.tolist() == [[1, 1, 1, 1]]
    decayed = advantages(
        L.returns_to_go(0.5), [1.0, 2.0], [0, 0], [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]]
    )
    np.testing.assert_allclose(decayed, [[0.25, 0.5, 0, 1, 0], [2, 0, 0, 0, 0]])


def test_whitening_sees_trained_tokens_only():
    # Without jit: XLA turns a product with a 0/1 mask into a selection, which hides NaN * 0.
    given = jnp.asarray([[1.0, 2.0, np.nan], [6.0, -50.0, np.inf]])
    batch = L.Batch(mask=jnp.asarray([[1.0, 1, 0], [1, 0, 0]]), advantage=given)
    loss = L.chain(L.whiten(), L.token_sum())
    got = np.asarray(loss.prepare(batch, loss.init(batch))[0].advantage)
    r = np.array([1.0, 2.0, 6.0])
    expected = (r - r.mean()) / r.std(ddof=1)
    np.testing.assert_allclose(got, [[*expected[:2], 0], [expected[2], 0, 0]], rtol=1e-5)


def test_the_overlong_penalty_equals_the_reference_and_stops_at_the_limit():
    case = GOLDEN["dapo_overlong_penalty"]
    lengths = [*case["inputs"]["lengths"], 30000.0]
    settings = case["hyperparameters"]
    member = L.overlong(settings["max_len"], settings["buffer"], settings["factor"])
    loss = L.chain(member, L.nll(), L.token_mean())
    batch = prepare(loss, mask=np.ones((6, 1)), reward=np.zeros(6), length=lengths)
    np.testing.assert_allclose(
        np.asarray(batch.reward), [*case["expected"]["penalty"], -1.0], rtol=1e-6
    )


def test_the_overlong_penalty_must_come_before_the_advantage():
    loss = L.chain(L.group_centre(), L.overlong(8, 2), L.token_mean())
    with pytest.raises(ValueError, match="before the advantage member"):
        prepare(loss, mask=np.ones((2, 1)), reward=[1, 1], length=[1, 1], group=[0, 0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: L.returns_to_go(1.5),
        lambda: L.whiten(eps=0.0),
        lambda: L.group_standardise(eps=-1.0),
        lambda: L.group_standardise(by="token"),  # pyright: ignore[reportArgumentType]
        lambda: L.overlong(100, 0),
        lambda: L.overlong(100, 200),
        lambda: L.overlong(100, 20, factor=-1.0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ValueError):
        make()
