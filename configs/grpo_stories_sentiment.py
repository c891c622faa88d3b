"""GRPO makes a story teller of 260 thousand parameters cheerful, in under a minute.

    pip install nltk-vader-sentiment
    rljax train configs/grpo_stories_sentiment.py --model stories260K.gguf

The model is stories260K (MIT, karpathy/tinyllamas) as a GGUF file of 1.2 MB, for instance
`testdata/stories260K.gguf` of github.com/mutablelogic/go-llama. Mean sentiment (-1 to 1) of stories
from 3 openings held out, seed 0: 0.25 before and 1.00 after, in 40 s on two CPU cores. It then
writes little else than cheer: KL to the reference 2.7 nats a token.
"""

from rljax import envs
from rljax.losses import algorithms
from rljax.recipes import grpo
from rljax.train.optimiser import OptimiserConfig

config = grpo.Config(
    model="stories260K.gguf",
    task=lambda: envs.sentiment(max_tokens=64),
    loss=algorithms.grpo(kl=0.01),
    steps=30,
    prompts=8,
    group=8,
    optimiser=OptimiserConfig(lr=3e-4),
    seed=0,
)
