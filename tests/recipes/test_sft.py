"""Supervised fine-tuning on a model of a few thousand parameters."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rljax import policy, trees
from rljax.data.chat import Tokenizer
from rljax.losses import algorithms, base
from rljax.models.spec import ModelConfig
from rljax.recipes import sft
from rljax.sharding import rules
from rljax.train import optimiser, step

PAIRS = [sft.Pair("ab", "cde", uid=0), sft.Pair("a", "jihgf", uid=1), sft.Pair("abj", "c", uid=2)]
TOKENIZER = Tokenizer.from_characters("abcdefghij")
CFG = ModelConfig("llama", 16, TOKENIZER.vocab_size, 32, 1, 2, 2, 16, 64, max_positions=64)
SETTINGS = sft.Config(
    model="", pairs=PAIRS, steps=80, batch=3, max_tokens=8,
    optimiser=optimiser.OptimiserConfig(lr=1e-2),
)  # fmt: skip


@pytest.fixture(scope="module")
def learned() -> tuple[policy.Policy, list[float]]:
    made = policy.scratch(CFG, TOKENIZER, seed=0)
    run = sft.Run(made, PAIRS, SETTINGS)
    return made, [values["loss"] for _, values in run.steps(SETTINGS.steps)]


def test_it_learns_one_batch(learned):
    _, losses = learned
    assert losses[0] == pytest.approx(np.log(12), rel=0.1)  # 12 ids, no preference yet
    assert losses[-1] < 0.05


@pytest.mark.parametrize("pair", PAIRS)
def test_the_end_is_learned_so_that_generation_stops(learned, pair):
    # Without a loss on the end token it would go on to max_tokens (trl pull request 6357).
    made, _ = learned
    assert made.sample(pair.prompt, temperature=0.0, max_tokens=12) == pair.completion


@pytest.fixture(scope="module")
def loss_of():
    """Loss and gradient norm at the initial parameters, from arrays."""
    made = policy.scratch(CFG, TOKENIZER, seed=0)
    optim = optimiser.make_optimiser(optimiser.OptimiserConfig(), 1)
    init = step.make_init(CFG, optim, rules.single())
    loss = algorithms.sft()
    update = step.make_step(CFG, loss, optim, step.StepConfig(), rules.single())
    blank = base.Batch(mask=np.zeros((1, 1)))  # pyright: ignore[reportArgumentType]

    def measure(sequences, batch) -> tuple[float, dict[str, np.ndarray]]:
        state = init(made.params).replace(loss_state=loss.init(blank))
        state, values = update(state, sequences, batch)
        return float(values["loss"].mean), jax.device_get(trees.flatten(state.params))

    return made, measure


def test_the_mask_is_the_completion_and_its_end(loss_of):
    made, _ = loss_of
    rows = sft.encode(made, PAIRS, 8)
    assert [len(c) for _, c in rows] == [4, 6, 2]  # "cde", "jihgf", "c", each with its end
    assert all(c[-1] == TOKENIZER.eos_id for _, c in rows)
    _, batch = sft.to_arrays(rows, 4, 8)
    want = [[1.0] * n + [0.0] * (8 - n) for n in (4, 6, 2)]
    assert np.asarray(batch.mask).tolist() == want


def test_padding_ids_change_nothing(loss_of):
    made, measure = loss_of
    sequences, batch = sft.to_arrays(sft.encode(made, PAIRS, 8), 4, 8)
    want, params = measure(sequences, batch)
    prompt, response = np.array(sequences.prompt), np.array(sequences.response)
    prompt[np.arange(4) >= np.asarray(sequences.prompt_length)[:, None]] = 5
    response[np.asarray(batch.mask)[:, None] == 0] = 5
    assert (response != np.asarray(sequences.response)).any()
    got, others = measure(sequences.replace(prompt=prompt, response=response), batch)
    assert got == want
    for name, x in params.items():
        np.testing.assert_array_equal(others[name], x, err_msg=name)


@pytest.mark.parametrize(("row", "token"), [(0, 0), (1, 5), (2, 1)])  # first, last (an end), end
def test_every_token_of_a_completion_counts(loss_of, row, token):
    made, measure = loss_of
    sequences, batch = sft.to_arrays(sft.encode(made, PAIRS, 8), 4, 8)
    want, _ = measure(sequences, batch)
    response = np.array(sequences.response)
    response[row, 0, token] = 7
    assert measure(sequences.replace(response=response), batch)[0] != want


def test_no_examples_and_a_long_one_are_refused(loss_of):
    made, _ = loss_of
    with pytest.raises(ValueError, match="no examples"):
        sft.encode(made, [], 8)
    with pytest.raises(ValueError, match="example 1 has a completion of 6 tokens"):
        sft.encode(made, PAIRS, 5)
