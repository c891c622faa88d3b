"""Losses of preferences: a chosen and a rejected response, or responses judged one by one.

Rows 2i and 2i + 1 of a batch belong together: responses 0 and 1 to one prompt, which is one row of
`Sequences` with two responses, so a cut into microbatches never parts them. The log-prob of a
response is the sum over its trained tokens.

These losses are functions of whole responses. They still fit the normal form, without an extension
of it: a member adds the loss of the pair to `extra` at every trained token of its two rows, the
advantage is 0, and the aggregate's weights, which add up to 1 over the tokens of all responses
(`sequence_mean_token_mean`), make the mean over pairs of it. It is live, so the gradient is exact.
A pair of which one response has no trained token is masked out.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.losses.base import Batch, LossTransform, State, Terms
from rljax.types import Array

PairLoss = Callable[[Array, Array], Array]


def on_pairs(
    fn: PairLoss, *, reference: bool = True, per_token: bool = False, name: str = ""
) -> LossTransform:
    """Makes a member of a function (chosen [P], rejected [P]) -> loss [P] of P pairs.

    Metrics preference/accuracy and preference/margin, of chosen - rejected.

    Args:
      reference: the arguments are log pi - log ref of the responses; otherwise log pi.
      per_token: they are means over the trained tokens of a response instead of sums.
    """

    def update(terms: Terms, batch: Batch, state: State) -> Terms:
        token = terms.logp
        if reference:
            assert batch.logp_ref is not None
            token = token - batch.logp_ref
        value = jnp.sum(token * batch.mask, axis=1)
        if per_token:
            value = value / jnp.maximum(jnp.sum(batch.mask, axis=1), 1.0)
        return _add(fn, terms, batch, value)

    return LossTransform(
        prepare=lambda batch, state: (_whole_pairs(batch), state),
        update=update,
        needs=frozenset({"mask", "logp_ref"} if reference else {"mask"}),
        gives=frozenset({"mask", "advantage"}),
        name=name or "on_pairs",
    )


def dpo_pairs(beta: float = 0.1, smoothing: float = 0.0) -> LossTransform:
    """-log sigmoid(beta h), h = log-ratio of chosen - log-ratio of rejected, to the reference.

    DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7). `smoothing` is the chance that a label
    is wrong (conservative DPO): (1 - s) l(h) + s l(-h).
    """
    _check("beta", beta)
    if not 0.0 <= smoothing < 0.5:
        raise ValueError(f"smoothing={smoothing} of dpo_pairs; it lies in [0, 0.5)")

    def fn(chosen: Array, rejected: Array) -> Array:
        h = beta * (chosen - rejected)
        return jax.nn.softplus(-h) + smoothing * h  # softplus(h) = softplus(-h) + h

    return on_pairs(fn, name="dpo_pairs")


def ipo_pairs(beta: float = 0.1) -> LossTransform:
    """(h - 1 / (2 beta))^2, h as in `dpo_pairs`.

    IPO (Azar et al. 2023, arXiv 2310.12036, equation 17; their tau is beta).
    """
    _check("beta", beta)
    return on_pairs(lambda c, r: (c - r - 0.5 / beta) ** 2, name="ipo_pairs")


def simpo_pairs(beta: float = 2.0, gamma: float = 1.0) -> LossTransform:
    """-log sigmoid(beta (mean log pi of chosen - mean log pi of rejected) - gamma), no reference.

    SimPO (Meng et al. 2024, arXiv 2405.14734, equation 6). Means are over tokens.
    """
    _check("beta", beta)

    def fn(chosen: Array, rejected: Array) -> Array:
        return jax.nn.softplus(gamma - beta * (chosen - rejected))

    return on_pairs(fn, reference=False, per_token=True, name="simpo_pairs")


def orpo_pairs(coefficient: float = 0.1) -> LossTransform:
    """-mean log pi of chosen - coefficient log sigmoid(log odds chosen - log odds rejected).

    ORPO (Hong et al. 2024, arXiv 2403.07691, equation 6), no reference. The odds p / (1 - p) are of
    p = exp(mean log pi over tokens), with log p capped at -1e-6.
    """
    _check("coefficient", coefficient)

    def log_odds(logp: Array) -> Array:
        logp = jnp.minimum(logp, -1e-6)
        return logp - jnp.log(-jnp.expm1(logp))

    def fn(chosen: Array, rejected: Array) -> Array:
        ratio = log_odds(chosen) - log_odds(rejected)
        return -chosen + coefficient * jax.nn.softplus(-ratio)

    return on_pairs(fn, reference=False, per_token=True, name="orpo_pairs")


def kto_rows(beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0) -> LossTransform:
    """Loss of responses that were judged one by one: good where reward > 0, else bad.

        good: desirable (1 - sigmoid(beta (r - z)))     bad: undesirable (1 - sigmoid(beta (z - r)))

    with r = log pi - log ref of the response and z = max(0, mean of r over mismatched responses),
    an estimate of KL(pi || ref) that carries no gradient. KTO (Ethayarajh et al. 2024, arXiv
    2402.01306, equation 8). Row 2i is judged; row 2i + 1 is a response to another prompt, under the
    prompt of row 2i: it enters z alone, by `logp_old` and `logp_ref`, over the full batch. Hence
    `Batch.logp_old` must be there in `prepare`, scored by the parameters before the update. State:
    z. Metrics preference/desired and preference/undesired, mean r of both kinds; preference/kl, z.
    """
    _check("beta", beta)

    def prepare(batch: Batch, state: State) -> tuple[Batch, State]:
        assert batch.logp_old is not None and batch.logp_ref is not None
        judged = jnp.arange(batch.mask.shape[0]) % 2 == 0
        known = jnp.isfinite(batch.logp_old) & jnp.isfinite(batch.logp_ref) & (batch.mask > 0)
        ratio = jnp.sum(jnp.where(known, batch.logp_old - batch.logp_ref, 0.0), axis=1)
        other = ~judged & jnp.any(known, axis=1)
        mean = jnp.sum(jnp.where(other, ratio, 0.0)) / jnp.maximum(jnp.sum(other), 1)
        mask = jnp.where(judged[:, None], batch.mask, 0.0)
        batch = batch.replace(mask=mask, advantage=jnp.zeros_like(mask))
        return batch, jnp.maximum(mean, 0.0)

    def update(terms: Terms, batch: Batch, z: State) -> Terms:
        assert batch.reward is not None and batch.logp_ref is not None
        r = jnp.sum((terms.logp - batch.logp_ref) * batch.mask, axis=1)
        good, live = batch.reward > 0, jnp.any(batch.mask > 0, axis=1).astype(jnp.float32)
        weight, sign = jnp.where(good, desirable, undesirable), jnp.where(good, 1.0, -1.0)
        loss = weight * jax.nn.sigmoid(beta * sign * (z - r))
        terms = terms.replace(extra=terms.extra + loss[:, None])
        terms = terms.measured("preference/kl", jnp.full_like(r, z), live)
        terms = terms.measured("preference/desired", r, live * good)
        return terms.measured("preference/undesired", r, live * ~good)

    return LossTransform(
        init=lambda batch: jnp.zeros((), jnp.float32),
        prepare=prepare,
        update=update,
        needs=frozenset({"mask", "reward", "logp_old", "logp_ref"}),
        gives=frozenset({"mask", "advantage"}),
        name="kto_rows",
    )


def score_pairs(margin: float = 0.0, centring: float = 0.0) -> LossTransform:
    """-log sigmoid(r_c - r_r - margin (reward_c - reward_r)) + centring (r_c + r_r)^2.

    The loss of a reward model by Bradley and Terry (1952), with the margin of Llama 2 (Touvron et
    al. 2023, arXiv 2307.09288, equation 2), here a factor on the difference of the ratings in
    `Batch.reward`, and the centring of Eisenstein et al. 2023 (arXiv 2312.09244, equation 4).
    r is `value_live` at the last token under the mask; log-probs are not read.
    """
    for name, x in (("margin", margin), ("centring", centring)):
        if not 0.0 <= x < float("inf"):
            raise ValueError(f"{name}={x} of score_pairs; it must be at least 0 and finite")

    def update(terms: Terms, batch: Batch, state: State) -> Terms:
        after = jnp.cumsum(batch.mask[:, ::-1], axis=1)[:, ::-1]
        last = (batch.mask > 0) & (after == 1)
        value = jnp.sum(jnp.where(last, terms.live["value_live"], 0.0), axis=1)
        m = 0.0
        if margin:
            assert batch.reward is not None
            m = margin * (batch.reward[0::2] - batch.reward[1::2])

        def fn(chosen: Array, rejected: Array) -> Array:
            loss = jax.nn.softplus(m - (chosen - rejected))
            return loss + centring * (chosen + rejected) ** 2

        return _add(fn, terms, batch, value)

    return LossTransform(
        prepare=lambda batch, state: (_whole_pairs(batch), state),
        update=update,
        needs=frozenset({"mask", "value_live"} | ({"reward"} if margin else set())),
        gives=frozenset({"mask", "advantage"}),
        name="score_pairs",
    )


def _whole_pairs(batch: Batch) -> Batch:
    """Masks out pairs with an empty response; advantage 0."""
    rows = batch.mask.shape[0]
    if rows % 2:
        raise ValueError(
            f"{rows} rows are not pairs; rows 2i and 2i + 1 hold the chosen and the rejected "
            "response to one prompt"
        )
    full = jnp.all(jnp.any(batch.mask > 0, axis=1).reshape(-1, 2), axis=1)
    mask = jnp.where(jnp.repeat(full, 2)[:, None], batch.mask, 0.0)
    return batch.replace(mask=mask, advantage=jnp.zeros_like(mask))


def _add(fn: PairLoss, terms: Terms, batch: Batch, value: Array) -> Terms:
    """Adds the loss of each pair to its tokens; `value` [B] is what is compared."""
    chosen, rejected = value[0::2], value[1::2]
    loss = jnp.repeat(fn(chosen, rejected), 2)
    terms = terms.replace(extra=terms.extra + loss[:, None])
    live = jnp.any(batch.mask > 0, axis=1)[0::2].astype(jnp.float32)
    right = (chosen > rejected).astype(jnp.float32)
    terms = terms.measured("preference/accuracy", right, live)
    return terms.measured("preference/margin", chosen - rejected, live)


def _check(name: str, value: float) -> None:
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name}={value} of a preference loss; it must be positive and finite")
