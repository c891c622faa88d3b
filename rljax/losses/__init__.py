"""Losses as short chains of transforms; the names below are the whole public surface.

    loss = chain(leave_one_out(), token_ratio(), clip_ratio(), kl_to_reference(0.01), token_mean())

Complete published chains are in `algorithms`. Importing this loads jax and nothing heavier.
"""

from rljax.losses import algorithms
from rljax.losses.advantage import (
    drop_flat_groups,
    drop_truncated,
    group_centre,
    group_standardise,
    leave_one_out,
    overlong,
    returns_to_go,
    whiten,
)
from rljax.losses.aggregate import (
    prompt_mean,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    sequence_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from rljax.losses.base import (
    Batch,
    LossTransform,
    Terms,
    chain,
    check_groups,
    on_batch,
    on_terms,
)
from rljax.losses.baselines import (
    budget_relative,
    pass_at_k_gain,
    role_baseline,
    turn_returns,
)
from rljax.losses.covariance import clip_cov, kl_cov
from rljax.losses.distill import nll, teacher_gain
from rljax.losses.preference import (
    dpo_pairs,
    ipo_pairs,
    kto_rows,
    on_pairs,
    orpo_pairs,
    score_pairs,
    simpo_pairs,
)
from rljax.losses.ratio import (
    geometric_ratio,
    mismatch_band,
    mismatch_cap,
    sequence_ratio,
    token_ratio,
)
from rljax.losses.regularise import (
    entropy_bonus,
    kl_estimate,
    kl_to_reference,
    log_ratio_penalty,
)
from rljax.losses.returns import gae, kl_in_reward, length_adaptive_gae, monte_carlo
from rljax.losses.surrogate import (
    clip_ratio,
    dual_clip,
    geometric_clip,
    quadratic,
    saturate,
    score,
    score_by_sign,
)
from rljax.losses.trust_region import (
    Divergence,
    binary_divergence,
    full_divergence,
    topk_divergence,
    trust_region,
)
from rljax.losses.value import bounded, value_huber, value_squared

__all__ = [
    "Batch",
    "Divergence",
    "LossTransform",
    "Terms",
    "algorithms",
    "binary_divergence",
    "bounded",
    "budget_relative",
    "chain",
    "check_groups",
    "clip_cov",
    "clip_ratio",
    "dpo_pairs",
    "drop_flat_groups",
    "drop_truncated",
    "dual_clip",
    "entropy_bonus",
    "full_divergence",
    "gae",
    "geometric_clip",
    "geometric_ratio",
    "group_centre",
    "group_standardise",
    "ipo_pairs",
    "kl_cov",
    "kl_estimate",
    "kl_in_reward",
    "kl_to_reference",
    "kto_rows",
    "leave_one_out",
    "length_adaptive_gae",
    "log_ratio_penalty",
    "mismatch_band",
    "mismatch_cap",
    "monte_carlo",
    "nll",
    "on_batch",
    "on_pairs",
    "on_terms",
    "orpo_pairs",
    "overlong",
    "pass_at_k_gain",
    "prompt_mean",
    "quadratic",
    "returns_to_go",
    "role_baseline",
    "saturate",
    "score",
    "score_by_sign",
    "score_pairs",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "sequence_ratio",
    "simpo_pairs",
    "teacher_gain",
    "token_mean",
    "token_ratio",
    "token_sum",
    "topk_divergence",
    "trust_region",
    "turn_returns",
    "value_huber",
    "value_squared",
    "whiten",
]
