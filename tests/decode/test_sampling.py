"""The sampler: its distribution, exact filters, log-probs, and ids that must never be drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.decode import sampling


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return sampling.Sampling(
        temperature=jnp.full(rows, temperature, jnp.float32),
        top_k=jnp.full(rows, top_k, jnp.int32),
        top_p=jnp.full(rows, top_p, jnp.float32),
        min_p=jnp.full(rows, min_p, jnp.float32),
    )


limits = jax.jit(sampling._limits)


@jax.jit
def one_row(logits, how):
    """A token and its log-probs a row of `how`, all of the distribution of `logits` [V]."""
    count = how.temperature.shape[0]
    zero = jnp.zeros(count, int)
    u = sampling.uniform(jnp.arange(count, dtype=jnp.uint32), zero, zero)
    return sampling.sample(jnp.broadcast_to(logits, (count, logits.shape[0])), u, how)


def draws(logits, count, **options):
    """[count] tokens and log-probs of one distribution, `count` seeds side by side."""
    out = one_row(jnp.asarray(logits, jnp.float32), settings(count, **options))
    return [np.asarray(x) for x in out]


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after temperature, top-k, top-p, min-p in plain loops (float64)."""
    z = np.asarray(logits, np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        for i in order[top_k:]:
            p[i] = 0.0
        p /= p.sum()
    if top_p < 1.0:
        kept, mass = [], 0.0
        for i in order:
            if mass >= top_p:
                break
            kept.append(i)
            mass += p[i]
        p = np.where(np.isin(np.arange(len(p)), kept), p, 0.0)
        p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


CASES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.35},
    {"top_p": 0.9},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 11, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_tokens_follow_the_filtered_distribution(options):
    logits = np.random.default_rng(0).normal(size=37) * 2
    expected = reference(logits, **options)
    count = 20_000
    token, logp, full = draws(logits, count, **options)
    seen = np.bincount(token, minlength=37)
    assert not seen[expected == 0].any()  # exactly the filtered set
    likely = count * expected >= 5
    chi2 = ((seen - count * expected)[likely] ** 2 / (count * expected)[likely]).sum()
    freedom = max(likely.sum() - 1, 1)
    assert chi2 < freedom + 4.5 * np.sqrt(2 * freedom)  # 4.5 standard deviations
    np.testing.assert_allclose(logp, np.log(expected[token]), atol=1e-5)
    np.testing.assert_allclose(full, np.log(reference(logits)[token]), atol=1e-5)


@pytest.mark.parametrize("vocab", [2, 3, 64, 5001])
@pytest.mark.parametrize("options", CASES[3:], ids=str)
def test_filters_keep_what_plain_loops_keep(vocab, options):
    logits = np.random.default_rng(vocab).normal(size=(3, vocab)).astype(np.float32) * 3
    z = jnp.asarray(logits) / options.get("temperature", 1.0)
    least = np.asarray(limits(z, settings(3, **options)))
    for row, z_row, x in zip(logits, np.asarray(z), least):
        assert ((z_row >= x) == (reference(row, **options) > 0)).all()


def test_ties_at_a_limit_stay_in():
    # HF's TopKLogitsWarper drops logits below the k-th largest; equals stay.
    z = jnp.asarray([[1.0, 0.0, 1.0, 1.0, -2.0]])
    assert float(limits(z, settings(1, top_k=2))[0]) == 1.0
    assert float(limits(z, settings(1, top_p=0.01))[0]) == 1.0


def test_rows_of_one_batch_keep_their_own_settings():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 50)), jnp.float32)
    u = sampling.uniform(jnp.arange(4, dtype=jnp.uint32), jnp.arange(4), jnp.arange(4))
    mixed = sampling.Sampling(
        temperature=jnp.asarray([0.0, 1.0, 0.7, 1.0]), top_k=jnp.asarray([0, 0, 5, 0]),
        top_p=jnp.asarray([1.0, 1.0, 1.0, 0.5]), min_p=jnp.zeros(4),
    )  # fmt: skip
    run = jax.jit(sampling.sample)
    together = run(logits, u, mixed)
    for b in range(4):
        row = jax.tree.map(lambda x, b=b: x[b : b + 1], mixed)
        alone = run(logits[b : b + 1], u[b : b + 1], row)
        for x, y in zip(together, alone):
            np.testing.assert_allclose(x[b], y[0], rtol=1e-6)
    assert int(together[0][0]) == int(logits[0].argmax()) and float(together[1][0]) == 0.0


def test_temperature_divides_logits_not_log_probs():
    # Logits [2, 0] at T = 0.5: log_softmax([4, 0])[0] = -0.0181; log_softmax([2, 0])[0] / 0.5 is
    # -0.2539.
    token, logp, full = draws([2.0, 0.0], 200, temperature=0.5)
    np.testing.assert_allclose(logp[token == 0], -0.018150, atol=1e-6)
    np.testing.assert_allclose(full[token == 0], -0.126928, atol=1e-6)
    np.testing.assert_allclose(logp[token == 1], -4.018150, atol=1e-5)


def test_log_prob_is_of_the_sampled_token_not_of_the_likeliest():
    token, logp, _ = draws([3.0, 0.0, -1.0], 500)
    assert set(token) == {0, 1, 2}
    np.testing.assert_allclose(logp, np.log(reference([3.0, 0.0, -1.0]))[token], atol=1e-5)


def test_padded_and_banned_ids_are_never_drawn_in_a_million():
    # 300 real ids, a head of 384 rows; ids 7 and 8 are banned but stay in the full softmax.
    real = np.random.default_rng(2).normal(size=300)
    logits = np.concatenate([real, np.full(84, np.finfo(np.float32).min)])
    allowed = jnp.ones(384, bool).at[jnp.asarray([7, 8])].set(False)

    @jax.jit
    def count(seed):
        u = sampling.uniform(jnp.full(20_000, seed), jnp.arange(20_000), jnp.zeros(20_000, int))
        rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (20_000, 384))
        token, _, full = sampling.sample(rows, u, settings(20_000), allowed)
        return jnp.bincount(token, length=384), token[:5], full[:5]

    seen = np.zeros(384, int)
    for seed in range(50):
        new, token, full = count(jnp.uint32(seed))
        seen += np.asarray(new)
    assert seen.sum() == 1_000_000
    assert not seen[300:].any() and not seen[[7, 8]].any() and (seen[:7] > 0).all()
    np.testing.assert_allclose(full, np.log(reference(real))[np.asarray(token)], atol=1e-5)


def test_rounding_never_draws_what_has_no_mass():
    # u at both ends of [0, 1), and masses whose running sum rounds.
    mass = jnp.asarray([[0.0, 1e-9, 1.0, 0.0, 0.3, 0.0]])
    for u in (0.0, 0.5, 1 - 2**-24, 1.0):
        assert int(sampling._pick(mass, jnp.asarray([u]))[0][0]) in (1, 2, 4)


def test_uniforms_depend_on_seed_sample_and_index_alone():
    seed = jnp.asarray([5, 5, 5, 9], jnp.uint32)
    u = np.asarray(sampling.uniform(seed, jnp.asarray([0, 0, 1, 0]), jnp.asarray([3, 4, 3, 3])))
    assert len(np.unique(u)) == 8
    alone = sampling.uniform(seed[3:], jnp.asarray([0]), jnp.asarray([3]))
    np.testing.assert_array_equal(u[3], np.asarray(alone)[0])


@pytest.mark.parametrize(
    "temperature,top_k,top_p,min_p",
    [(1.0, 0, 1.0, 0.0), (0.7, 3, 1.0, 0.0), (1.3, 0, 0.6, 0.05), (0.0, 0, 1.0, 0.0)],
)
def test_likeliest_tokens_are_those_of_the_distribution_drawn_from(
    temperature, top_k, top_p, min_p
):
    B, V, count = 64, 9, 11
    logits = 2 * jax.random.normal(jax.random.key(1), (B, V))
    allowed = jnp.arange(V) != 4
    how = sampling.Sampling(
        temperature=jnp.full(B, temperature), top_k=jnp.full(B, top_k),
        top_p=jnp.full(B, top_p), min_p=jnp.full(B, min_p),
    )  # fmt: skip
    u = jax.random.uniform(jax.random.key(2), (B, 2))
    token, logp, _ = sampling.sample(logits, u, how, allowed)
    ids, found = jax.device_get(sampling.likeliest(logits, how, count, allowed))
    kept = ids >= 0
    assert not (ids == 4).any() and (found[~kept] == 0).all() and not kept[:, V - 1 :].any()
    np.testing.assert_allclose(np.where(kept, np.exp(found), 0).sum(-1), 1.0, rtol=1e-5)
    assert all(len(set(row[k])) == k.sum() for row, k in zip(ids, kept, strict=True))
    chosen = (ids == np.asarray(token)[:, None]) & kept
    assert (chosen.sum(-1) == 1).all()
    np.testing.assert_allclose(found[chosen], logp, atol=1e-5)
    assert (kept.sum(-1) == 1).all() if temperature == 0 else (kept.sum(-1) > 1).any()
