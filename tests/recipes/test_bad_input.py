"""Mistakes that a recipe meets: each is one paragraph that says what to change, in time."""

from __future__ import annotations

import math
import shutil
import types
from typing import Any

import numpy as np
import pytest

from rljax import envs, policy, rewards
from rljax.checkpoint import CheckpointError
from rljax.data.chat import Tokenizer
from rljax.losses import algorithms
from rljax.models.spec import ModelConfig
from rljax.recipes import grpo
from rljax.recipes import workdir as runs
from rljax.sharding import rules
from rljax.sharding.mesh import MeshConfig, make_mesh

TOKENIZER = Tokenizer.from_characters("abcdefghijklmn")
CFG = ModelConfig("llama", 16, TOKENIZER.vocab_size, 16, 1, 2, 1, 8, 32, max_positions=24)


def ones(texts: Any, examples: Any) -> list[float]:
    del examples
    return [1.0] * len(texts)


def task(reward: Any = ones, prompts: tuple[str, ...] = ("a", "bc", "d")) -> envs.Task:
    return envs.custom(prompts, reward, max_tokens=4)


@pytest.fixture(scope="module")
def made() -> policy.Policy:
    return policy.scratch(CFG, TOKENIZER, seed=0)


@pytest.fixture
def nothing_sampled(monkeypatch) -> None:
    """A mistake that is known at the start must be refused before anything is sampled."""

    def run(*_: Any) -> None:
        raise AssertionError("sampled before the mistake was refused")

    monkeypatch.setattr(policy.Policy, "run", run)


@pytest.mark.usefixtures("nothing_sampled")
@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"group": 1}, "responses of one prompt"),
        ({"temperature": 0.0}, "greedily"),
        ({"prompts": 3, "group": 3, "microbatches": 2}, "9 rows do not divide into 2 microbatches"),
        ({"prompts": 3, "updates": 2}, "3 prompts do not divide into 2 updates"),
        ({"max_prompt_tokens": 1}, "row 1 has 2 tokens and max_prompt_tokens is 1"),
        ({"max_tokens": 24}, "past the model's 24 positions"),
        ({"loss": algorithms.dppo("topk"), "topk": 0}, "likeliest ids and topk is 0"),
        ({"loss": algorithms.bpco()}, "reads `value`, which this recipe does not provide"),
        ({"loss": algorithms.ppo()}, "reads `advantage`"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(made, settings, fact):
    with pytest.raises(ValueError, match=fact) as caught:
        grpo.start(made, task(), **settings)
    assert_paragraph(caught.value)


def assert_paragraph(error: BaseException) -> None:
    text = str(error)
    assert "\n" not in text and 30 < len(text) < 500


@pytest.mark.usefixtures("nothing_sampled")
def test_one_sample_a_prompt_is_fine_without_a_group_baseline(made):
    grpo.start(made, task(), group=1, loss=algorithms.reinforce())


@pytest.mark.usefixtures("nothing_sampled")
def test_rows_that_do_not_divide_over_the_devices_are_refused(made):
    layout = rules.Layout.of(make_mesh(MeshConfig(fsdp=8)), rules.TRAIN_RULES)
    params = policy.scratch(CFG, TOKENIZER, seed=0, layout=layout).params
    spread = policy.Policy(CFG, params, TOKENIZER, layout=layout)
    with pytest.raises(ValueError, match="over 8 devices; use a multiple of 8"):
        grpo.start(spread, task(), prompts=3, group=4)


def test_a_task_without_rows_or_reward_is_refused():
    with pytest.raises(ValueError, match="no row to train on"):
        task(prompts=())
    with pytest.raises(ValueError, match="no reward function"):
        task(reward=None)


def broken(texts: Any, examples: Any) -> list[float]:
    raise KeyError("answer")


def short(texts: Any, examples: Any) -> list[float]:
    return [1.0]


def not_a_number(texts: Any, examples: Any) -> list[float]:
    return [math.nan] * len(texts)


@pytest.fixture(scope="module")
def run(made) -> grpo.Run:
    """One run for the tests below; nothing of it is compiled before it samples."""
    return grpo.start(made, task(), prompts=2, group=2, seed=0)


@pytest.mark.parametrize(
    ("reward", "fact"),
    [
        (broken, "broken raised KeyError"),
        (short, "short returned 1 values for 4 completions"),
        (not_a_number, "not_a_number returned nan for row uid"),
    ],
)
def test_a_wrong_reward_function_is_named_and_nothing_is_updated(run, reward, fact):
    run.task = task(reward)
    with pytest.raises(rewards.RewardError, match=fact) as caught:
        run.step()
    assert_paragraph(caught.value)
    assert run.number == 0 and int(run.state.step) == 0


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_run_stops_at_a_number_that_is_none_naming_step_and_metric(name):
    with pytest.raises(FloatingPointError, match=f"step 7: {name} is nan.*lower learning rate"):
        runs.check_finite(7, {"loss": 0.0, "grad_norm": 1.0, name: math.nan})


def test_parameters_that_are_not_finite_stop_the_run(made):
    # The sampler draws something, but the gradient of a NaN parameter is NaN.
    bad = {**made.params, "final_norm": np.full(16, np.nan, np.float32)}
    spoiled = grpo.start(policy.Policy(CFG, bad, TOKENIZER), task(), prompts=2, group=2, seed=0)
    spoiled.policy.update(made.params)  # only the trainer's copy is spoiled
    with pytest.raises(FloatingPointError, match=r"step 0: (loss|grad_norm) is nan"):
        spoiled.step()


def test_a_disk_without_room_is_refused_before_the_first_step(made, monkeypatch, tmp_path):
    usage = types.SimpleNamespace(total=1 << 40, used=1 << 40, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    config = grpo.Config(model=lambda: made, task=task(), prompts=4, group=2, steps=1)
    monkeypatch.setattr(policy.Policy, "run", lambda *_: pytest.fail("sampled before the refusal"))
    with pytest.raises(CheckpointError, match="free") as caught:
        grpo.run(config, tmp_path)
    assert_paragraph(caught.value)


def test_resume_without_a_checkpoint_says_how_to_start(made, tmp_path):
    saver = runs.Saver(tmp_path, made, every=1, last=1)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint; start the run again"):
        saver.restore(None)  # pyright: ignore[reportArgumentType]
