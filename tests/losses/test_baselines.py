"""Baselines by role, budget and best of k, and credit by turn: reference cases and loops."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.testing import check_loss

CASES = json.loads((Path(__file__).parents[1] / "golden" / "baselines.json").read_text())
GOLDEN = {case["name"]: case for case in CASES["cases"]}


def array(x) -> np.ndarray:
    return np.asarray(x["data"], x["dtype"]).reshape(x["shape"])


def prepare(member: L.LossTransform, batch: L.Batch, state=None):
    """(advantage [B, T], mask, state of the member) after one batch."""
    loss = L.chain(member, L.token_sum())
    state = loss.init(batch) if state is None else (state, ())
    out, state = jax.jit(loss.prepare)(jax.tree.map(jnp.asarray, batch), state)
    return np.asarray(out.advantage), np.asarray(out.mask), state[0]


@pytest.mark.parametrize("name", [n for n in GOLDEN if n.startswith("rae/")])
def test_the_role_baseline_equals_the_reference(name):
    case = GOLDEN[name]
    config, inputs, outputs = (
        case["config"], {k: array(x) for k, x in case["inputs"].items()},
        {k: array(x) for k, x in case["outputs"].items()},
    )  # fmt: skip
    order = {"pre": "subtract_first", "post": "update_first"}[config["mode"]]
    member = L.role_baseline(6, config["decay"], config["gamma"], order)  # pyright: ignore
    turns = inputs["turns"].reshape(-1)  # two rows a game, one token a turn
    arrays = {
        "mask": (np.arange(3) < turns[:, None]).astype(np.float32),
        "reward": inputs["rewards"].reshape(-1).astype(np.float32),
        "role": (2 * inputs["game_id"][:, None] + np.arange(2)).reshape(-1),
        "turn": np.tile(np.arange(3), (12, 1)),
    }
    whole, _, table = prepare(member, L.Batch(**arrays))
    np.testing.assert_allclose(whole, outputs["per_turn"].reshape(12, 3), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(table, outputs["baseline_after"][-1].reshape(-1), rtol=1e-5)
    # In three batches of two games the state goes on from one to the next.
    state, parts = None, []
    for start in range(0, 12, 4):
        part = L.Batch(**{k: x[start : start + 4] for k, x in arrays.items()})
        advantage, _, state = prepare(member, part, state)
        parts.append(advantage)
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-6)


def test_a_response_without_a_reward_leaves_the_role_baseline_alone():
    batch = L.Batch(mask=np.ones((3, 1)), reward=np.array([1, np.nan, 1]), role=np.zeros(3, int))  # pyright: ignore
    advantage, _, table = prepare(L.role_baseline(1, decay=0.5), batch)
    assert advantage[:, 0].tolist() == [1.0, 0.0, 0.5] and table.tolist() == [0.75]


@pytest.mark.parametrize("name", [n for n in GOLDEN if n.startswith("brpo/")])
def test_budget_relative_advantages_equal_the_reference(name):
    case = GOLDEN[name]
    inputs = {k: array(x) for k, x in case["inputs"].items()}
    mode = {"brpo": "both", "v1only": "earlier", "v2only": "group", "none": "none"}
    member = L.budget_relative(
        tuple(inputs["budgets"].tolist()), inputs["prior"].tolist(), mode[case["config"]["mode"]]  # pyright: ignore
    )  # fmt: skip
    lengths = inputs["cot_len"].reshape(-1)
    batch = L.Batch(
        mask=(np.arange(10) < lengths[:, None]).astype(np.float32),  # pyright: ignore
        budget_score=inputs["scores"].mean(-1).reshape(6, 4),  # pyright: ignore
        group=np.repeat([7, 3], 3),  # pyright: ignore
    )
    wanted = array(case["outputs"]["token_adv"]).reshape(6, 8)
    got, _, _ = prepare(member, batch)
    np.testing.assert_allclose(got[:, :8], wanted, rtol=1e-5, atol=1e-6)
    assert np.all(got[:, 8:] == 0)


def test_a_response_without_a_budget_score_is_not_trained_on():
    score = np.array([[1.0, 0.0], [0.0, np.nan], [0.0, 0.0]])
    batch = L.Batch(mask=np.ones((3, 4)), budget_score=score, group=np.zeros(3, int))  # pyright: ignore
    advantage, mask, _ = prepare(L.budget_relative((2, 4)), batch)
    assert mask[:, 0].tolist() == [1, 0, 1] and np.all(advantage[1] == 0)
    np.testing.assert_allclose(advantage[:, 0], [0.25, 0, -0.25])  # R_0 is 0.5 and 0


@pytest.mark.parametrize(("right", "k"), [(1, 1), (3, 1), (1, 2), (2, 3), (4, 2), (2, 4)])
def test_pass_at_k_equals_the_mean_over_all_subsets(right, k):
    n = 6
    reward = np.array([1.0] * right + [0.0] * (n - right))
    sets = list(itertools.combinations(range(n), k))
    best = np.array([reward[list(s)].max() for s in sets])
    unit = (best - best.mean()) / best.std()  # the biased std of the paper
    wanted = [np.mean([u for u, s in zip(unit, sets, strict=True) if i in s]) for i in range(n)]
    batch = L.Batch(mask=np.ones((n, 1)), reward=reward, group=np.zeros(n, int))  # pyright: ignore
    got, _, _ = prepare(L.pass_at_k_gain(k), batch)
    np.testing.assert_allclose(got[:, 0], wanted, rtol=1e-4, atol=1e-6)


def test_pass_at_k_gives_nothing_where_every_subset_is_worth_the_same():
    # All right, all wrong, and five right of six: every pair holds a right one.
    reward = np.array([*[1.0] * 6, *[0.0] * 6, *[1.0] * 5, 0.0])
    batch = L.Batch(mask=np.ones((18, 1)), reward=reward, group=np.arange(18) // 6)  # pyright: ignore
    assert np.all(prepare(L.pass_at_k_gain(2), batch)[0] == 0)
    with pytest.raises(ValueError, match=r"pass_at_k_gain .* with 4 responses .* to 5 or more"):
        L.check_groups(L.algorithms.pass_at_k(4), 4)
    L.check_groups(L.algorithms.pass_at_k(4), 5)


def test_all_tokens_of_a_turn_share_its_return_and_what_lies_between_has_none():
    mask = np.array([[1, 1, 0, 0, 1, 0, 1, 1, 0]], np.float32)
    turn = np.array([[0, 0, 0, 1, 2, 2, 3, 3, 4]])  # turns 1 and 4 were not the policy's
    token_reward = np.array([[1, 2, 99, 99, 4, 99, 0, 8, 99]], np.float32)
    batch = L.Batch(
        mask=mask, turn=turn, token_reward=token_reward, reward=np.array([16.0])  # pyright: ignore
    )  # fmt: skip
    got, _, _ = prepare(L.turn_returns(0.5), batch)
    last = 8 + 16
    middle = 4 + 0.5 * last
    first = 3 + 0.5 * middle
    assert got.tolist() == [[first, first, 0, 0, middle, 0, last, last, 0]]


def test_one_turn_a_token_gives_returns_to_go():
    rng = np.random.default_rng(0)
    mask = (np.arange(6) < np.array([[6], [4]])).astype(np.float32)
    fields = {
        "mask": mask,
        "reward": np.array([1.0, -1.0]),
        "token_reward": rng.normal(size=(2, 6)),
    }
    batch = L.Batch(**fields, turn=np.tile(np.arange(6), (2, 1)))  # pyright: ignore
    got, wanted = (prepare(m(0.9), batch)[0] for m in (L.turn_returns, L.returns_to_go))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_the_members_keep_the_contract():
    for member in (
        L.pass_at_k_gain(2),
        L.role_baseline(2, gamma=0.9),
        L.budget_relative((1, 2, 4, 7), (0.1, 0.2, 0.3, 0.4)),
        L.turn_returns(0.9),
    ):
        check_loss(L.chain(member, L.token_ratio(), L.clip_ratio(), L.token_mean()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: L.role_baseline(decay=1.0),
        lambda: L.role_baseline(gamma=2.0),
        lambda: L.budget_relative(()),
        lambda: L.budget_relative((4, 2)),
        lambda: L.budget_relative((2, 4), (1.0,)),
        lambda: L.pass_at_k_gain(0),
        lambda: L.turn_returns(-0.1),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ValueError):
        make()
