"""Published algorithms as chains; `ALGORITHMS` finds those that learn from rewards by name.

Options that they share:
  low, high: the ratio is clipped to [1 - low, 1 + high]; floats, as all the others without a hint.
  anchor: denominator of the ratio, "old" (default), "sampler" or "reference".
  kl: coefficient of `kl_to_reference` (kind k3); at 0 no reference is scored.
  entropy: coefficient of `entropy_bonus`; at 0 no entropy is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.losses import advantage as adv
from rljax.losses import aggregate as agg
from rljax.losses import returns, value
from rljax.losses.base import Batch, LossTransform, Terms, chain, on_terms
from rljax.losses.distill import nll
from rljax.losses.ratio import Anchor, geometric_ratio, token_ratio
from rljax.losses.regularise import entropy_bonus, kl_to_reference
from rljax.losses.surrogate import clip_ratio, dual_clip, score


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
    region = (token_ratio("sampler"), _binary_tv(delta), score(high=cap))
    policy = (returns.length_adaptive_gae(alpha), *region)
    return _close(policy, kl, entropy, agg.sequence_mean_token_sum())


def _binary_tv(delta: float) -> LossTransform:
    """Drops tokens that move away from the sampler and are |pi - mu| > delta from it already."""

    def fn(terms: Terms, batch: Batch) -> Terms:
        assert batch.advantage is not None and batch.logp_sampler is not None
        gap = jnp.exp(jax.lax.stop_gradient(terms.logp)) - jnp.exp(batch.logp_sampler)
        dead = (jnp.abs(gap) > delta) & (batch.advantage * gap > 0)
        return terms.replace(keep=jnp.where(dead, 0.0, terms.keep))

    return on_terms(fn, needs=["advantage", "logp_sampler"], name="binary_tv")


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

    Liu et al. 2025, arXiv 2503.20783, section 3.2. Set `horizon` to the token limit of a response:
    it scales the loss.
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


def sft() -> LossTransform:
    """Supervised fine-tuning: mean negative log-likelihood of the trained tokens."""
    return chain(nll(), agg.token_mean())


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
    )
}
