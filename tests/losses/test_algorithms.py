"""Every algorithm keeps the contract of a chain and replays its reference cases."""

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

CASES = json.loads((Path(__file__).parents[1] / "golden" / "policy_losses.json").read_text())
GOLDEN = {case["name"]: case for case in CASES["cases"]}


@pytest.mark.parametrize("name", A.ALGORITHMS)
def test_every_algorithm_keeps_the_contract(name):
    loss = A.ALGORITHMS[name](kl=0.1, entropy=0.01)
    check_loss(loss, on_policy=name != "clip_cov")  # it silences tokens at any ratio


def test_the_members_outside_the_default_algorithms_keep_the_contract():
    check_loss(
        L.chain(
            L.overlong(6, 3),
            L.drop_truncated(),
            L.leave_one_out(standardise=True),
            L.sequence_ratio("sampler"),
            L.clip_ratio(),
            L.dual_clip(),
            L.kl_to_reference(0.1, "k1+", importance=True),
            L.prompt_mean(),
        )
    )
    check_loss(A.sft())


def test_algorithms_compute_only_what_their_options_ask_for():
    assert A.grpo().needs == {"reward", "group", "group>1", "logp_old"}
    assert A.grpo(kl=0.1).needs - A.grpo().needs == {"logp_ref"}
    assert A.grpo(entropy=0.1).needs - A.grpo().needs == {"entropy"}
    assert A.dapo(max_length=100).needs - A.dapo().needs == {"length"}
    assert A.cispo(anchor="sampler").needs - A.grpo().needs == {"logp_sampler"}
    assert A.rloo().needs == {"reward", "group", "group>1"}


@pytest.mark.parametrize("name", A.ALGORITHMS)
def test_a_negative_coefficient_is_refused(name):
    with pytest.raises(ValueError, match="kl_to_reference"):
        A.ALGORITHMS[name](kl=-0.1)


def given_advantage(loss: L.LossTransform) -> L.LossTransform:
    """The algorithm without the members that make its advantage."""
    makers = ("drop_flat_groups", "overlong")
    kept = [m for m in loss.members if "advantage" not in m.gives and m.name not in makers]
    return L.chain(*kept)


POLICIES = {
    "ppo_clip_table": A.ppo(anchor="sampler"),
    "ppo_dual_clip": A.ppo(dual=3.0, anchor="sampler"),
    "dapo_clip_higher_token_mean": given_advantage(A.dapo()),
    "grpo_seq_mean_token_mean": given_advantage(A.grpo()),
    "dr_grpo_constant_horizon": given_advantage(A.dr_grpo(horizon=8)),
    "gspo_token_form_wide": given_advantage(A.gspo(0.1, 0.1, anchor="sampler")),
    "gspo_token_form_paper_eps": given_advantage(A.gspo(anchor="sampler")),
    "cispo_table": given_advantage(A.cispo(cap=3.0, anchor="sampler")),
    "cispo_batch": given_advantage(A.cispo(0.8, 1.28, anchor="sampler")),
    "reinforce_no_correction": L.chain(L.token_mean()),
    "pg_token_tis": L.chain(L.token_ratio("sampler"), L.score(high=1.1), L.token_mean()),
    "pg_seq_tis": L.chain(
        L.sequence_ratio("sampler"), L.score(high=3.0), L.sequence_mean_token_sum_norm(8)
    ),
    "topr_sequence": given_advantage(A.topr()),
    "grpo_token_tis": L.chain(
        L.token_ratio(), L.clip_ratio(), L.mismatch_cap(1.2), L.sequence_mean_token_sum_norm(8)
    ),
    "grpo_seq_mis": L.chain(
        L.token_ratio(),
        L.clip_ratio(),
        L.mismatch_band(0.0, 2.0, "sequence"),
        L.sequence_mean_token_sum_norm(8),
    ),
    "icepop_token": given_advantage(A.icepop(0.8, 1.25)),
    "sapo_table": given_advantage(A.sapo(anchor="sampler")),
    "spo_table": given_advantage(A.spo(0.2, anchor="sampler")),
    "drpo_table_delta_0p2": L.chain(
        L.token_ratio("sampler"), L.quadratic(0.2, "sampler"), L.token_mean()
    ),
    "drpo_table_delta_12p5": L.chain(
        L.token_ratio("sampler"), L.quadratic(12.5, "sampler"), L.token_mean()
    ),
    "drpo_batch": given_advantage(A.drpo(0.15, horizon=8)),
    "gmpo_geometric_mean": given_advantage(A.gmpo(0.2, 0.2, anchor="sampler")),
    "dro_log_ratio_penalty": given_advantage(A.dro(0.3)),
}


def region(case: dict) -> L.LossTransform:
    """DPPO or its predictive form with the divergence and thresholds of a reference case."""
    h = case["hyperparameters"]
    family, kind = h["divergence"].split("_")
    vocab = np.shape(case["inputs"]["logits"])[-1]
    divergence = {
        "binary": lambda: L.binary_divergence(kind),
        "topk": lambda: L.topk_divergence(kind, h.get("tail") or "ignored", vocab),
        "full": lambda: L.full_divergence(kind),
    }[family]()
    member = L.trust_region(divergence, h["delta_low"], h["delta_high"], h["direction"])
    cap = (L.score(high=h["ratio_cap"]),) if h["ratio_cap"] else ()
    return L.chain(L.token_ratio("sampler"), member, *cap, L.token_mean())


REGIONS = ("dppo", "predictive_divergence_mask")
POLICIES |= {
    name: region(case)
    for name, case in GOLDEN.items()
    if case["algorithm"] in REGIONS and case["kind"] == "policy_loss"
}


def top_slots(case: dict) -> np.ndarray:
    """Ids of the sampler's likeliest tokens [B, T, K]; -1 where the sampled one replaces one."""
    h, mu = case["hyperparameters"], np.array(case["inputs"]["mu_logits"])
    ids = np.argsort(-mu, -1, kind="stable")[..., : h["top_k"]]
    if h["support"] == "replace_last":
        absent = ~np.any(ids == np.array(case["inputs"]["actions"])[..., None], -1)
        ids[..., -1][absent] = -1
    return ids


def vocabulary(case: dict, logits: jax.Array) -> tuple[dict, dict]:
    """(Batch fields, live arrays) that head and engine give for a case's distributions."""
    inputs, h = case["inputs"], case["hyperparameters"]
    log_mu = jax.nn.log_softmax(jnp.asarray(inputs["mu_logits"], jnp.float32))
    log_pi = jax.lax.stop_gradient(jax.nn.log_softmax(logits))
    mu, pi, a = jnp.exp(log_mu), jnp.exp(log_pi), jnp.asarray(inputs["actions"])
    one = jax.nn.one_hot(a, mu.shape[-1])
    squares = jnp.sum(pi**2, -1)
    mu_a, pi_a = jnp.sum(mu * one, -1), jnp.sum(pi * one, -1)
    step = pi * (one - pi + (squares - pi_a)[..., None])
    sign = jnp.where(jnp.abs(pi - mu) > 1e-7, jnp.sign(pi - mu), 0.0)
    live = {
        "sum_squares": squares,
        "full_kl": jnp.sum(jnp.where(mu > 0, mu * (log_mu - log_pi), 0.0), -1),
        "full_tv": 0.5 * jnp.sum(jnp.abs(mu - pi), -1),
        "full_kl_dot": pi_a - mu_a + jnp.sum(pi * (mu - pi), -1),
        "full_tv_dot": 0.5 * jnp.sum(sign * step, -1),
    }
    fields = {"token": a}
    if h.get("top_k"):
        ids = top_slots(case)
        at = np.maximum(ids, 0)
        fields |= {
            "topk_ids": jnp.asarray(ids),
            "topk_logp": jnp.take_along_axis(log_mu, at, -1),
        }
        live["topk_logp_live"] = jnp.take_along_axis(log_pi, at, -1)
    return fields, live


@pytest.mark.parametrize("name", POLICIES)
def test_policy_losses_equal_the_reference(name):
    case, loss = GOLDEN[name], POLICIES[name]
    inputs = {k: np.array(v) for k, v in case["inputs"].items()}
    mask = inputs["mask"].astype(np.float32)

    def pick(logits):
        logp = jax.nn.log_softmax(logits.astype(jnp.float32))
        return jnp.take_along_axis(logp, inputs["actions"][..., None], -1)[..., 0]

    @jax.jit
    def everything(logits):
        anchors = {"mu_logits": "logp_sampler", "old_logits": "logp_old"}
        given = {field: pick(inputs[k]) for k, field in anchors.items() if k in inputs}
        live = {}
        if case["algorithm"] in REGIONS:
            fields, live = vocabulary(case, logits)
            given |= fields
        batch = L.Batch(
            mask=jnp.asarray(mask), advantage=jnp.asarray(inputs["advantages"]), **given
        )
        batch, state = loss.prepare(batch, loss.init(batch))
        value, by_logits = jax.value_and_grad(lambda z: loss(pick(z), batch, state, **live)[0])(
            logits
        )
        logp = pick(logits)
        by_logp = jax.grad(lambda x: loss(x, batch, state, **live)[0])(logp)
        each = jnp.eye(mask.size).reshape(-1, *mask.shape)
        tokens = jax.vmap(lambda w: loss(logp, batch.replace(weight=w), state, **live)[0])(each)
        return value, by_logits, by_logp, tokens.reshape(mask.shape), batch.weight

    out = jax.device_get(everything(inputs["logits"].astype(np.float32)))
    value, by_logits, by_logp, tokens, weight = out
    expected = case["expected"]
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(tokens, expected["per_token_loss"], rtol=1e-4, atol=1e-6)
    coefficient = np.array(expected["per_token_coefficient"])
    np.testing.assert_allclose(by_logp, weight * coefficient, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(by_logits, case["expected_gradient"]["value"], rtol=1e-4, atol=1e-6)


def test_bpco_equals_its_reference_from_rewards_and_values_to_both_gradients():
    path = Path(__file__).parents[1] / "golden" / "returns.json"
    cases = json.loads(path.read_text())["cases"]
    [case] = [c for c in cases if c["name"] == "bpco_end_to_end"]
    inputs = {k: jnp.asarray(v) for k, v in case["inputs"].items()}
    expected, hyper = case["expected"], case["hyperparameters"]
    loss, critic = A.bpco(delta=hyper["delta_low"]), A.critic()

    def pick(logits):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), inputs["actions"][..., None], -1)[
            ..., 0
        ]

    def head(raw):
        return L.bounded(raw, 0.0, 1.0)

    @jax.jit
    def everything(logits, raw):
        batch = L.Batch(
            mask=inputs["mask"].astype(jnp.float32), reward=inputs["rewards"], value=head(raw),
            logp_sampler=pick(inputs["mu_logits"]),
        )  # fmt: skip
        batch, state = loss.prepare(batch, loss.init(batch))
        policy = jax.value_and_grad(lambda z: loss(pick(z), batch, state)[0])(logits)
        taught, own = critic.prepare(batch, critic.init(batch))
        zero = jnp.zeros_like(raw)
        value = jax.value_and_grad(lambda x: critic(zero, taught, own, value_live=head(x))[0])(raw)
        return policy, value, batch

    (value, by_logits), (critic_loss, by_raw), batch = everything(
        inputs["logits"], inputs["raw_values"]
    )
    mask = np.asarray(inputs["mask"])
    np.testing.assert_allclose(batch.advantage, inputs["advantages"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(batch.value_target, mask * np.array(expected["mc_targets"]))
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(by_logits, case["expected_gradient"]["value"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(critic_loss, expected["value_loss"], rtol=1e-5)
    wanted = expected["value_loss_gradient_wrt_raw"]
    np.testing.assert_allclose(by_raw, wanted, rtol=1e-4, atol=1e-7)


def divergences(case: dict):
    """(terms, batch) of a case whose numbers a divergence reads directly."""
    logits = jnp.asarray(case["inputs"]["logits"], jnp.float32)
    fields, live = vocabulary(case, logits)
    at = jnp.asarray(case["inputs"]["actions"])[..., None]
    logp, log_mu = (
        jnp.take_along_axis(jax.nn.log_softmax(x), at, -1)[..., 0]
        for x in (logits, jnp.asarray(case["inputs"]["mu_logits"], jnp.float32))
    )
    zero = jnp.zeros_like(logp)
    terms = L.Terms(logp, zero, logp, zero, zero, zero, live, {})
    return terms, L.Batch(mask=zero + 1, logp_sampler=log_mu, **fields)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_a_finer_partition_never_has_the_smaller_divergence(kind):
    case = GOLDEN[f"divergence_ordering_{kind}"]
    terms, batch = divergences(case)
    found = {
        "binary": L.binary_divergence(kind).value(terms, batch),
        "topk": L.topk_divergence(kind).value(terms, batch),
        "full": L.full_divergence(kind).value(terms, batch),
    }
    for name, value in found.items():
        np.testing.assert_allclose(value, case["expected"][name], rtol=1e-4, atol=1e-6)
    assert np.all(found["binary"] <= found["topk"] + 1e-6)
    assert np.all(found["topk"] <= found["full"] + 1e-6)


def test_predicted_directions_equal_the_reference():
    case = GOLDEN["predictive_direction_values"]
    terms, batch = divergences(case)
    vocab = np.shape(case["inputs"]["logits"])[-1]
    for kind in ("kl", "tv"):
        slope = L.full_divergence(kind).slope(terms, batch)
        np.testing.assert_allclose(slope, case["expected"][f"dot_full_{kind}"], atol=1e-6)
        for tail in ("aggregated", "uniform", "proportional", "ignored"):
            slope = L.topk_divergence(kind, tail, vocab).slope(terms, batch)
            expected = case["expected"][f"dot_topk2_{kind}_{tail}"]
            np.testing.assert_allclose(slope, expected, atol=1e-6, err_msg=f"{kind} {tail}")
