"""A model of 1.2 million parameters learns two-digit addition from nothing: SFT, then GRPO.

SFT shows it two ways to answer "47+38=": a guess, "70" (the tens alone), or a worked answer,
" 15 85" (the units, then the sum). It takes either; GRPO finds that work pays.

    rljax train configs/grpo_tiny.py

Accuracy on 100 held-out sums, seed 0: 0.40 before GRPO and 0.89 after it at temperature 1, greedy
0.42 and 0.99. The whole run took 1 min 47 s on two cores of a Xeon with AVX-512.
"""

import random

from rljax import envs, policy
from rljax.data.chat import Tokenizer
from rljax.losses import algorithms
from rljax.models.spec import ModelConfig
from rljax.recipes import grpo, sft
from rljax.train.optimiser import OptimiserConfig

task = envs.arithmetic(digits=2, held_out=100, train_rows=3000, template="{a}+{b}=", max_tokens=8)


def warm() -> policy.Policy:
    """Draws a model and shows it the sums of the training rows, half of them only guessed."""
    tokenizer = Tokenizer.from_characters("0123456789+= ")
    cfg = ModelConfig("llama", 16, tokenizer.vocab_size, 192, 2, 6, 6, 32, 768, max_positions=64)
    made = policy.scratch(cfg, tokenizer, seed=0)
    rng = random.Random(0)
    pairs = []
    for e in [*task.train] * 4:
        a, b = (int(n) for n in str(e.prompt)[:-1].split("+"))
        guess, work = f"{a // 10 * 10 + b // 10 * 10}", f" {a % 10 + b % 10} {a + b}"
        pairs.append(sft.Pair(e.prompt, rng.choice([guess, work])))
    settings = sft.Config(
        model="", pairs=pairs, steps=600, batch=64, max_tokens=8,
        optimiser=OptimiserConfig(lr=2e-3, schedule="linear", warmup_steps=50),
    )  # fmt: skip
    for _ in sft.Run(made, pairs, settings).steps(settings.steps):
        pass
    return made


config = grpo.Config(
    model=warm,
    task=task,
    loss=algorithms.grpo(kl=0.001),
    steps=22,
    prompts=32,
    group=8,
    optimiser=OptimiserConfig(lr=2e-4, schedule="linear", warmup_steps=3),
    seed=0,
    eval_samples=4,
)
