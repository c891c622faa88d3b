"""GRPO makes a 260 thousand parameter story teller cheerful, in under a minute on two CPU cores."""

import os

from rljax import envs
from rljax.losses import algorithms
from rljax.recipes import grpo
from rljax.train.optimiser import OptimiserConfig

config = grpo.Config(
    model=os.environ.get("STORIES", "../shared/data/models/stories260K.gguf"),
    task=lambda: envs.sentiment(max_tokens=64),
    loss=algorithms.grpo(kl=0.01),
    steps=30,
    prompts=8,
    group=8,
    optimiser=OptimiserConfig(lr=3e-4),
    seed=0,
)
