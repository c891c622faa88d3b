"""The policy handle on a model of a few thousand parameters: sample, score, save, load."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rljax import policy, trees
from rljax.checkpoint import Checkpoints
from rljax.data.chat import Tokenizer
from rljax.decode.batching import Request
from rljax.models.spec import ModelConfig
from rljax.sharding import rules
from rljax.train import optimiser, step

LETTERS = "abcdefghij.\n"
CFG = ModelConfig("llama", 16, len(LETTERS) + 2, 24, 2, 2, 1, 12, 40, max_positions=64)


@pytest.fixture(scope="module")
def made() -> policy.Policy:
    return policy.scratch(CFG, Tokenizer.from_characters(LETTERS), seed=0)


@pytest.fixture(scope="module")
def text(made) -> str:
    return made.sample("abc", seed=5, max_tokens=12)


def test_the_same_seed_gives_the_same_text(made, text):
    assert made.sample("abc", seed=5, max_tokens=12) == text
    assert made.sample("abc", seed=6, max_tokens=12) != text


def test_n_samples_are_a_list_whose_first_is_the_single_one(made, text):
    texts = made.sample("abc", n=3, seed=5, max_tokens=12)
    assert texts[0] == text and len(texts) == 3 and len(set(texts)) == 3


def test_a_completion_ends_with_the_first_stop_string(made):
    texts = made.sample("abc", n=8, seed=0, max_tokens=12, stop=("d", "."))
    assert any("d" in t or "." in t for t in texts)  # else this shows nothing
    for t in texts:
        first = min((t.find(s) for s in "d." if s in t), default=len(t) - 1)
        assert first == len(t) - 1


def test_stop_ids_are_the_end_and_every_token_that_holds_a_stop_string(made):
    # Characters have ids 2, 3, ... in the order of LETTERS; 1 is the end of a text.
    assert set(made.stop_ids()) == {1}
    assert set(made.stop_ids((".", "\n"))) == {1, 2 + LETTERS.index("."), 2 + LETTERS.index("\n")}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_of_sampled_ids_is_the_log_prob_they_were_sampled_with(made, temperature):
    request = Request(made.encode("abc"), seed=1, max_tokens=10, temperature=temperature)
    completion = made.run([request])[0][0]
    scored = made.score("abc", completion.ids, temperature)
    np.testing.assert_allclose(scored, completion.logp, atol=1e-4)
    full = scored if temperature == 1.0 else made.score("abc", completion.ids)
    np.testing.assert_allclose(full, completion.logp_full, atol=1e-4)


def test_padded_ids_are_never_sampled():
    # 14 of 64 ids are used; with a flat head three in four samples would be padding.
    cfg = ModelConfig("llama", 64, len(LETTERS) + 2, 24, 1, 2, 1, 12, 40, max_positions=64)
    made = policy.scratch(cfg, Tokenizer.from_characters(LETTERS), seed=0)
    [group] = made.run([Request([2, 3], samples=8, max_tokens=16, temperature=5.0)])
    assert max(int(c.ids.max()) for c in group) < len(LETTERS) + 2


def test_a_saved_folder_loads_and_samples_the_same(made, text, tmp_path):
    made.save(tmp_path)
    loaded = policy.load(tmp_path)
    same = jax.tree.map(np.array_equal, trees.flatten(loaded.params), trees.flatten(made.params))
    assert all(same.values())
    assert loaded.sample("abc", seed=5, max_tokens=12) == text


def test_a_run_directory_loads_with_its_last_checkpoint(made, text, tmp_path):
    optim = optimiser.make_optimiser(optimiser.OptimiserConfig(lr=1e-3), 1)
    state = step.make_init(CFG, optim, rules.single())(made.params)
    zeros = state.replace(params=jax.tree.map(np.zeros_like, state.params))
    policy.write_description(made, tmp_path)
    saved = Checkpoints(tmp_path / policy.CHECKPOINTS)
    saved.save(3, zeros)
    saved.save(4, state)
    loaded = policy.load(tmp_path)
    assert loaded.version == 4 and loaded.cfg == CFG
    assert loaded.sample("abc", seed=5, max_tokens=12) == text


def test_a_run_directory_without_checkpoint_says_so(made, tmp_path):
    policy.write_description(made, tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        policy.load(tmp_path)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        policy.load(str(tmp_path / "nowhere"))


def test_new_parameters_are_used_and_stamp_their_version(made):
    other = policy.scratch(CFG, made.tokenizer, seed=1)
    want = other.sample("abc", seed=5, max_tokens=12)
    mine = policy.Policy(CFG, made.params, made.tokenizer)
    mine.sample("abc", seed=5, max_tokens=12)
    mine.update(other.params, version=7)
    completion = mine.run([Request(mine.encode("abc"), seed=5, max_tokens=12, stop_ids=(1,))])[0][0]
    assert mine.tokenizer.decode(completion.ids.tolist()) == want
    assert set(completion.version.tolist()) == {7}
