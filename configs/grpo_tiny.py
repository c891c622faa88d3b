"""A model of 1.2 million parameters learns addition from nothing: SFT warm-up, then GRPO.

rljax train configs/grpo_tiny.py
"""

import random

from rljax import envs, policy
from rljax.data.chat import Tokenizer
from rljax.losses import algorithms
from rljax.models.spec import ModelConfig
from rljax.recipes import grpo, sft
from rljax.train.optimiser import OptimiserConfig

task = envs.arithmetic(digits=1, held_out=20, template="{a}+{b}=", max_tokens=4)


def warm() -> policy.Policy:
    """Draws a model and shows it the sums, half of them with a wrong result."""
    tokenizer = Tokenizer.from_characters("0123456789+=")
    cfg = ModelConfig("llama", 16, tokenizer.vocab_size, 128, 6, 4, 2, 32, 384, max_positions=64)
    made = policy.scratch(cfg, tokenizer, seed=0)
    rng = random.Random(0)
    pairs = []
    for e in task.train:
        wrong = str(rng.randrange(19))
        pairs += [sft.Pair(e.prompt, e.answer), sft.Pair(e.prompt, wrong)]
    settings = sft.Config(
        model="", pairs=pairs, steps=120, batch=32, max_tokens=4,
        optimiser=OptimiserConfig(lr=1e-3, warmup_steps=10),
    )  # fmt: skip
    for _ in sft.Run(made, pairs, settings).steps(settings.steps):
        pass
    return made


config = grpo.Config(
    model=warm,
    task=task,
    loss=algorithms.grpo(kl=0.001),
    steps=60,
    prompts=16,
    group=8,
    optimiser=OptimiserConfig(lr=3e-4, warmup_steps=5),
    seed=0,
    eval_samples=8,
)
