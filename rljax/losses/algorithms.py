"""Published algorithms as chains; `ALGORITHMS` finds those that learn from rewards by name,
`PREFERENCES` those that learn from pairs or judged responses.

Options that they share:
  low, high: the ratio is clipped to [1 - low, 1 + high]; floats, as all the others without a hint.
  anchor: denominator of the ratio, "old" (default), "sampler" or "reference".
  kl: coefficient of `kl_to_reference` (kind k3); at 0 no reference is scored.
  entropy: coefficient of `entropy_bonus`; at 0 no entropy is computed.
  horizon: constant length in `sequence_mean_token_sum_norm`, normally the token limit of a
    response: it scales the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rljax.losses import advantage as adv
from rljax.losses import aggregate as agg
from rljax.losses import baselines as bas
from rljax.losses import covariance as cov
from rljax.losses import preference as pref
from rljax.losses import returns, value
from rljax.losses import trust_region as trust
from rljax.losses.base import LossTransform, chain
from rljax.losses.distill import nll, teacher_gain
from rljax.losses.ratio import (
    Anchor,
    Level,
    geometric_ratio,
    mismatch_band,
    mismatch_cap,
    sequence_ratio,
    token_ratio,
)
from rljax.losses.regularise import entropy_bonus, kl_to_reference, log_ratio_penalty
from rljax.losses.surrogate import (
    clip_ratio,
    dual_clip,
    geometric_clip,
    quadratic,
    saturate,
    score,
    score_by_sign,
)

DELTA = {"tv": 0.15, "kl": 0.05}  # thresholds of DPPO's stability study


def _close(
    policy: tuple[LossTransform, ...], kl: float, entropy: float, aggregate: LossTransform
) -> LossTransform:
    """The chain of a policy, the regularisers whose coefficient is not 0, and an aggregate."""
    penalty = (kl_to_reference(kl),) if kl else ()
    bonus = (entropy_bonus(entropy),) if entropy else ()
    return chain(*policy, *penalty, *bonus, aggregate)


def ppo(
    low=0.2, high=0.2, dual: float | None = None, anchor: Anchor = "old", kl=0.0, entropy=0.0
) -> LossTransform:
    """Clipped policy loss of PPO, token mean; the caller fills `Batch.advantage`, or see `ppo_gae`.

    Schulman et al. 2017, arXiv 1707.06347, equation 7; `dual` adds the cap of arXiv 1912.09729.
    Departure: the policy part alone, without a critic's loss.
    """
    capped = (dual_clip(dual),) if dual is not None else ()
    policy = (token_ratio(anchor), clip_ratio(low, high), *capped)
    return _close(policy, kl, entropy, agg.token_mean())


def ppo_gae(
    gamma=1.0, lambda_=0.95, low=0.2, high=0.2, anchor: Anchor = "old", kl=0.0, entropy=0.0
) -> LossTransform:
    """PPO with a critic: generalised advantages whitened over the batch, clipped ratio, token mean.

    Schulman et al. 2017, arXiv 1707.06347, with arXiv 1506.02438; whitened as is usual for
    language models (Ouyang et al. 2022, arXiv 2203.02155). The critic's own loss is `critic`.
    """
    policy = (returns.gae(gamma, lambda_), adv.whiten(), token_ratio(anchor), clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.token_mean())


def bpco(delta=0.2, alpha=0.4, cap=20.0, kl=0.0, entropy=0.0) -> LossTransform:
    """BPCO: a critic in place of a group, one response a prompt is enough; nothing is normalised.

    Qi, Zhou and Lee, arXiv 2608.23566: length-adaptive advantages, Monte-Carlo targets, a binary TV
    trust region around the sampler. Departures: lambda is clamped to [0, 1]; score form, whose
    ratio `cap` bounds.
    """
    region = trust.trust_region(trust.binary_divergence("tv"), delta, delta)
    ratio = token_ratio("sampler")
    policy = (returns.length_adaptive_gae(alpha), ratio, region, score(high=cap))
    return _close(policy, kl, entropy, agg.sequence_mean_token_sum())


def grpo(low=0.2, high=0.2, anchor: Anchor = "old", kl=0.0, entropy=0.0) -> LossTransform:
    """GRPO: standardised group rewards, clipped ratio, mean of sequence means.

    Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, equation 3. Departures: kl 0 (paper 0.04);
    the std is unbiased (over n - 1).
    """
    policy = (adv.group_standardise(), token_ratio(anchor), clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.sequence_mean_token_mean())


def dr_grpo(
    horizon=1024.0, low=0.2, high=0.2, anchor: Anchor = "old", kl=0.0, entropy=0.0
) -> LossTransform:
    """Dr. GRPO: no division by the group's std nor by the response's length.

    Liu et al. 2025, arXiv 2503.20783, section 3.2.
    """
    policy = (adv.group_centre(), token_ratio(anchor), clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.sequence_mean_token_sum_norm(horizon))


def dapo(
    low=0.2, high=0.28, max_length=0, buffer=0, anchor: Anchor = "old", kl=0.0, entropy=0.0
) -> LossTransform:
    """DAPO: clip-higher, flat groups dropped, soft overlong punishment, token mean.

    Yu et al. 2025, arXiv 2503.14476, equation 8. Departures: dropped groups are masked, not
    refilled; without `max_length` no punishment (paper: 20480 tokens, buffer a fifth of it).
    """
    shaping = (adv.overlong(max_length, buffer or max_length // 5),) if max_length else ()
    advantage = (adv.drop_flat_groups(), *shaping, adv.group_standardise())
    policy = (*advantage, token_ratio(anchor), clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.token_mean())


def gspo(low=3e-4, high=4e-4, anchor: Anchor = "old", kl=0.0, entropy=0.0) -> LossTransform:
    """GSPO: the ratio is the geometric mean over the sequence, and is clipped as such.

    Zheng et al. 2025, arXiv 2507.18071, equation 14 (token form). Log ratio capped at 10, as verl.
    """
    ratio = geometric_ratio(anchor, clamp=10.0)
    policy = (adv.group_standardise(), ratio, clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.sequence_mean_token_mean())


def cispo(floor=0.0, cap=5.0, anchor: Anchor = "old", kl=0.0, entropy=0.0) -> LossTransform:
    """CISPO: the clipped ratio only weighs log pi, so no token loses its gradient.

    MiniMax 2025 (MiniMax-M1), arXiv 2506.13585, equation 4. `floor` and `cap` bound the ratio; the
    paper has no floor and does not print its cap.
    """
    policy = (adv.group_standardise(), token_ratio(anchor), score(floor, cap))
    return _close(policy, kl, entropy, agg.token_mean())


def rloo(kl=0.0, entropy=0.0) -> LossTransform:
    """RLOO: REINFORCE against the mean reward of the prompt's other responses.

    Ahmadian et al. 2024, arXiv 2402.14740, section 3.3; a response is one action. Departure: the KL
    is a loss term, where the paper puts it into the reward.
    """
    return _close((adv.leave_one_out(),), kl, entropy, agg.sequence_mean_token_sum())


def reinforce(gamma=1.0, kl=0.0, entropy=0.0) -> LossTransform:
    """REINFORCE without baseline: returns to go times grad log pi, summed over each response.

    Williams 1992, Machine Learning 8, section 4.
    """
    return _close((adv.returns_to_go(gamma),), kl, entropy, agg.sequence_mean_token_sum())


def reinforce_pp(
    gamma=1.0, low=0.2, high=0.2, anchor: Anchor = "old", kl=0.0, entropy=0.0
) -> LossTransform:
    """REINFORCE++: token returns whitened over the batch, clipped ratio, no group needed.

    Hu 2025, arXiv 2501.03262. Departure: the KL is a loss term, where the paper puts it into the
    reward.
    """
    policy = (adv.returns_to_go(gamma), adv.whiten(), token_ratio(anchor), clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.token_mean())


def reinforce_pp_baseline(
    low=0.2, high=0.2, anchor: Anchor = "old", kl=0.0, entropy=0.0
) -> LossTransform:
    """REINFORCE++ with baseline: reward minus the group's mean, whitened over the batch.

    Hu 2025, arXiv 2501.03262; the paper's k2 penalty is `kl_to_reference(c, "k2")` in a chain of
    your own.
    """
    policy = (adv.group_centre(), adv.whiten(), token_ratio(anchor), clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.token_mean())


def critic(clip: float | None = None) -> LossTransform:
    """A critic's own loss: squared distance from the targets, token mean.

    The targets are those of the policy's chain, `ppo_gae` or `bpco`; `clip` as in `value_squared`.
    """
    return chain(value.value_squared(clip), agg.token_mean())


def pass_at_k(k=4, low=0.2, high=0.2, anchor: Anchor = "old", kl=0.0, entropy=0.0) -> LossTransform:
    """Pass@k training: a response is worth what it adds to the best of k.

    Chen et al. 2025, arXiv 2508.10751; takes groups larger than k.
    """
    policy = (bas.pass_at_k_gain(k), token_ratio(anchor), clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.sequence_mean_token_mean())


def rae(
    roles=2, decay=0.95, horizon=4096.0, low=0.2, high=0.2, anchor: Anchor = "old", kl=0.0,
    entropy=0.0,
) -> LossTransform:  # fmt: skip
    """SPIRAL: moving baseline by role, clipped ratio, sum over tokens by a constant.

    Liu et al. 2025, arXiv 2506.24119. Departure: a response with advantage 0 is not dropped, and
    so counts as a sequence.
    """
    policy = (bas.role_baseline(roles, decay), token_ratio(anchor), clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.sequence_mean_token_sum_norm(horizon))


def brpo(
    budgets=(2000, 4000, 6000, 8000), prior=None, horizon=8000.0, low=0.2, high=0.2,
    anchor: Anchor = "old", kl=0.0, entropy=0.0,
) -> LossTransform:  # fmt: skip
    """BRPO: budget-relative advantages of anytime reasoning, sum over tokens by a constant.

    Qi et al. 2025 (AnytimeReasoner), arXiv 2505.13438; the reasoning policy. `horizon` is the
    padded length of a response in the released code.
    """
    policy = (bas.budget_relative(budgets, prior), token_ratio(anchor), clip_ratio(low, high))
    return _close(policy, kl, entropy, agg.sequence_mean_token_sum_norm(horizon))


def dppo(
    divergence: Literal["binary", "topk", "full"] = "binary", kind: trust.Kind = "tv",
    low: float | None = None, high: float | None = None, cap=20.0,
    form: Literal["score", "ratio"] = "score", anchor: Anchor = "sampler", horizon=1024.0,
    kl=0.0, entropy=0.0,
) -> LossTransform:  # fmt: skip
    """DPPO: tokens are masked by how far their distribution moved, not by their ratio.

    Qi et al. 2026, arXiv 2602.04879. `low`, `high`: thresholds, 0.15 for TV and 0.05 for KL; `cap`
    bounds the ratio of the score form (5 in the paper's scaling runs). `anchor` is of the ratio
    and the binary divergence; the paper warns of "old". Top-K and full compare with the sampler.
    """
    region = trust.trust_region(_divergence(divergence, kind, anchor), *_delta(kind, low, high))
    ratio, surrogate = token_ratio(anchor), ((score(high=cap),) if form == "score" else ())
    policy = (adv.group_centre(), ratio, region, *surrogate)
    return _close(policy, kl, entropy, agg.sequence_mean_token_sum_norm(horizon))


def dppo_predictive(
    divergence: Literal["topk", "full"] = "topk", kind: trust.Kind = "kl",
    tail: trust.Tail = "proportional", vocab=0, low: float | None = None,
    high: float | None = None, cap=5.0, horizon=1024.0, kl=0.0, entropy=0.0,
) -> LossTransform:  # fmt: skip
    """DPPO whose mask asks whether the coming step, not the last one, raises the divergence.

    Zhou et al. 2026, arXiv 2607.10848. `tail`, `vocab` as in `topk_divergence`; departure: the
    proportional tail, exact for the top-K divergence, where the paper has aggregated and uniform.
    """
    measure = _divergence(divergence, kind, "sampler", tail, vocab)
    region = trust.trust_region(measure, *_delta(kind, low, high), "predicted")
    policy = (adv.group_centre(), token_ratio("sampler"), region, score(high=cap))
    return _close(policy, kl, entropy, agg.sequence_mean_token_sum_norm(horizon))


def drpo(
    delta=0.15, anchor: Anchor = "sampler", horizon=1024.0, kl=0.0, entropy=0.0
) -> LossTransform:
    """DRPO: a quadratic penalty of radius `delta` in |pi - mu| replaces DPPO's mask.

    Yao et al. 2026, arXiv 2606.09821. Departure: the authors' code has delta 12.5, with which the
    penalty changes no weight by more than 8 %; 0.15 is the radius of DPPO.
    """
    policy = (adv.group_centre(), token_ratio(anchor), quadratic(delta, scale=anchor))
    return _close(policy, kl, entropy, agg.sequence_mean_token_sum_norm(horizon))


def spo(delta=0.2, anchor: Anchor = "old", kl=0.0, entropy=0.0) -> LossTransform:
    """SPO: PPO with a quadratic penalty on the ratio in place of the clip, token mean.

    Xie et al. 2024, arXiv 2401.16025. Departure: group advantages, where the paper has a critic.
    """
    policy = (adv.group_standardise(), token_ratio(anchor), quadratic(delta))
    return _close(policy, kl, entropy, agg.token_mean())


def sapo(up=1.0, down=1.05, anchor: Anchor = "old", kl=0.0, entropy=0.0) -> LossTransform:
    """SAPO: a sigmoid gate of the ratio, sharper for bad tokens, in place of the clip.

    Gao et al. 2025, arXiv 2511.20347. `up`, `down`: temperatures where A > 0 and elsewhere.
    """
    policy = (adv.group_standardise(), token_ratio(anchor), saturate(up, down))
    return _close(policy, kl, entropy, agg.sequence_mean_token_mean())


def topr(anchor: Anchor = "sampler", kl=0.0, entropy=0.0) -> LossTransform:
    """TOPR: good responses are imitated, bad ones weighted by their sequence ratio, at most 1.

    Le Roux et al. 2025, arXiv 2503.14286. Departure: rewards minus the group's mean, where the
    paper takes rewards of -1 and 1 minus a constant.
    """
    policy = (adv.group_centre(), sequence_ratio(anchor), score_by_sign())
    return _close(policy, kl, entropy, agg.sequence_mean_token_sum())


def gmpo(low=0.4, high=0.4, anchor: Anchor = "old", kl=0.0, entropy=0.0) -> LossTransform:
    """GMPO: tokens clipped in log space, then the geometric mean of their ratios.

    Zhao et al. 2025, arXiv 2507.20673. Log ratios are kept in [-low, high].
    """
    policy = (adv.group_standardise(), token_ratio(anchor), geometric_clip(low, high))
    return _close(policy, kl, entropy, agg.sequence_mean_token_mean())


def dro(beta=0.1, anchor: Anchor = "sampler", kl=0.0, entropy=0.0) -> LossTransform:
    """DRO: A log pi minus beta / 2 times the squared log ratio, per token.

    Richemond et al. 2024, arXiv 2405.19107. Departures: the group's mean reward in place of a
    learned value, tokens in place of whole responses, the sampler in place of the reference.
    """
    policy = (adv.group_centre(), log_ratio_penalty(beta, anchor))
    return _close(policy, kl, entropy, agg.token_mean())


def tis(cap=2.0, level: Level = "token", low=0.2, high=0.2, kl=0.0, entropy=0.0) -> LossTransform:
    """GRPO weighted by min(old / sampler, cap): truncated importance sampling.

    Yao et al. 2025, fengyao.notion.site/off-policy-rl.
    """
    policy = (adv.group_standardise(), token_ratio(), clip_ratio(low, high))
    return _close((*policy, mismatch_cap(cap, level)), kl, entropy, agg.token_mean())


def mis(
    limit=2.0, level: Level = "sequence", low=0.2, high=0.2, kl=0.0, entropy=0.0
) -> LossTransform:
    """GRPO weighted by old / sampler, responses above `limit` dropped: masked importance sampling.

    Compared with others in arXiv 2510.26788.
    """
    policy = (adv.group_standardise(), token_ratio(), clip_ratio(low, high))
    return _close((*policy, mismatch_band(0.0, limit, level)), kl, entropy, agg.token_mean())


def icepop(floor=0.5, limit=5.0, low=0.2, high=0.2, kl=0.0, entropy=0.0) -> LossTransform:
    """GRPO without the tokens whose old / sampler leaves [floor, limit], weighted by it inside.

    Ling team 2025, arXiv 2510.18855.
    """
    policy = (adv.group_standardise(), token_ratio(), clip_ratio(low, high))
    correction = mismatch_band(floor, limit)
    return _close((*policy, correction), kl, entropy, agg.sequence_mean_token_mean())


def clip_cov(
    fraction=2e-4, floor=1.0, limit=5.0, low=0.2, high=0.2, anchor: Anchor = "old", kl=0.0,
    entropy=0.0,
) -> LossTransform:  # fmt: skip
    """GRPO where a few tokens of large covariance of A and log pi lose their gradient; token mean.

    Cui et al. 2025, arXiv 2505.22617. `floor`, `limit`: the band of covariances. Departures: the
    largest within the band, not random ones; the sampler's log-probs.
    """
    policy = (adv.group_standardise(), token_ratio(anchor), clip_ratio(low, high))
    return _close((*policy, cov.clip_cov(fraction, floor, limit)), kl, entropy, agg.token_mean())


def kl_cov(
    coefficient=1.0, fraction=2e-3, anchor: Anchor = "old", kl=0.0, entropy=0.0
) -> LossTransform:
    """Unclipped GRPO that holds the tokens of the largest covariance near the old policy.

    Cui et al. 2025, arXiv 2505.22617; token mean. Departure: the sampler's log-probs choose.
    """
    policy = (adv.group_standardise(), token_ratio(anchor), cov.kl_cov(coefficient, fraction))
    return _close(policy, kl, entropy, agg.token_mean())


def _divergence(
    name: str, kind: trust.Kind, anchor: Anchor, tail: trust.Tail = "ignored", vocab: int = 0
) -> trust.Divergence:
    """A divergence by the name that `dppo` takes."""
    if name not in ("binary", "topk", "full"):
        raise ValueError(f'divergence={name!r} of dppo; it is "binary", "topk" or "full"')
    if name == "binary":
        return trust.binary_divergence(kind, anchor)
    return (
        trust.topk_divergence(kind, tail, vocab) if name == "topk" else trust.full_divergence(kind)
    )


def _delta(kind: str, low: float | None, high: float | None) -> tuple[float, float]:
    """Thresholds for A < 0 and A > 0, DPPO's where none is given."""
    usual = DELTA.get(kind, 1.0)
    return usual if low is None else low, usual if high is None else high


def sft() -> LossTransform:
    """Supervised fine-tuning: mean negative log-likelihood of the trained tokens."""
    return chain(nll(), agg.token_mean())


def distil(low=0.0, high=5.0) -> LossTransform:
    """On-policy distillation: lowers KL(policy || teacher) on the policy's own completions.

    Agarwal et al. 2023 (GKD), arXiv 2306.13649, with a policy gradient of the sampled tokens in
    place of the full vocabulary. `Batch.logp_ref` is the teacher's. The ratio to the sampler,
    within [low, high], weighs each token. Its opposite, KL(teacher || policy), is `sft` on the
    teacher's completions.
    """
    return chain(teacher_gain(), token_ratio("sampler"), score(low, high), agg.token_mean())


def dpo(beta=0.1, smoothing=0.0) -> LossTransform:
    """DPO, direct preference optimisation; the mean over pairs.

    Rafailov et al. 2023, arXiv 2305.18290, equation 7.
    """
    return chain(pref.dpo_pairs(beta, smoothing), agg.sequence_mean_token_mean())


def ipo(beta=0.1) -> LossTransform:
    """IPO: the difference of the log-ratios is drawn to 1 / (2 beta).

    Azar et al. 2023, arXiv 2310.12036, equation 17.
    """
    return chain(pref.ipo_pairs(beta), agg.sequence_mean_token_mean())


def simpo(beta=2.0, gamma=1.0) -> LossTransform:
    """SimPO: mean log-probs a token with a margin, no reference.

    Meng et al. 2024, arXiv 2405.14734, equation 6.
    """
    return chain(pref.simpo_pairs(beta, gamma), agg.sequence_mean_token_mean())


def orpo(coefficient=0.1) -> LossTransform:
    """ORPO: imitates the chosen response and adds the log odds ratio, no reference.

    Hong et al. 2024, arXiv 2403.07691, equation 6.
    """
    return chain(pref.orpo_pairs(coefficient), agg.sequence_mean_token_mean())


def kto(beta=0.1, desirable=1.0, undesirable=1.0) -> LossTransform:
    """KTO: responses judged good or bad one by one, against a running KL.

    Ethayarajh et al. 2024, arXiv 2402.01306, equation 8.
    """
    return chain(pref.kto_rows(beta, desirable, undesirable), agg.sequence_mean_token_mean())


def reward_model(margin=0.0, centring=0.0) -> LossTransform:
    """Reward model of pairs by Bradley and Terry (1952).

    Margin by the difference of ratings: Llama 2, arXiv 2307.09288, equation 2; centring:
    Eisenstein et al. 2023, arXiv 2312.09244.
    """
    return chain(pref.score_pairs(margin, centring), agg.sequence_mean_token_mean())


ALGORITHMS: dict[str, Callable[..., LossTransform]] = {
    f.__name__: f
    for f in (
        ppo,
        ppo_gae,
        bpco,
        grpo,
        dr_grpo,
        dapo,
        gspo,
        cispo,
        rloo,
        reinforce,
        reinforce_pp,
        reinforce_pp_baseline,
        dppo,
        dppo_predictive,
        drpo,
        spo,
        sapo,
        topr,
        gmpo,
        dro,
        tis,
        mis,
        icepop,
        clip_cov,
        kl_cov,
        pass_at_k,
        rae,
        brpo,
    )
}

PREFERENCES: dict[str, Callable[..., LossTransform]] = {
    f.__name__: f for f in (dpo, ipo, simpo, orpo, kto)
}
