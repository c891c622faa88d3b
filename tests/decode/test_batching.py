"""Continuous batching: samples do not depend on their neighbours; limits, stops, groups, errors."""

import numpy as np
import pytest

from rljax.decode.batching import Batcher, Request, generate_all

PROMPTS = [[5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 7, 6], [1], [2, 3, 5, 7]]


def same(a, b):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
    np.testing.assert_allclose(a.logp_full, b.logp_full, atol=1e-5)
    assert a.stop_reason == b.stop_reason


@pytest.fixture
def mixed():
    """Thirteen samples of seven requests with different lengths and distributions."""
    return [
        Request(PROMPTS[0], seed=1, samples=3, max_tokens=17),
        Request(PROMPTS[1], seed=2, max_tokens=70, temperature=0.7, top_p=0.8),
        Request(PROMPTS[2], seed=3, samples=4, max_tokens=5, top_k=4),
        Request(PROMPTS[3], seed=4, max_tokens=1),
        Request(PROMPTS[4], seed=5, samples=2, max_tokens=30, stop_ids=(2, 3, 11, 40)),
        Request(PROMPTS[0], seed=6, max_tokens=9, temperature=0.0),
        Request(PROMPTS[0], seed=7, max_tokens=9, min_p=0.3),
    ]


@pytest.mark.parametrize(
    "size", [{"slots": 1}, {"slots": 4}, {"slots": 6, "share": 3}, {"slots": 16, "prefill_rows": 3}]
)
def test_a_sample_does_not_depend_on_slots_or_neighbours(tools, mixed, size):
    # The reference has one request at a time in four slots; more requests than slots wait.
    made, tree = tools.machine(tools.plain)
    alone = [c for r in mixed for c in generate_all(made, tree, [r])]
    other, tree = tools.machine(tools.plain, **size)
    ended = []
    together = generate_all(other, tree, mixed, on_done=lambda place, c: ended.append((place, c)))
    assert len(together) == 13
    for a, b in zip(together, alone, strict=True):
        same(a, b)
    assert sorted(place for place, _ in ended) == list(range(13))
    assert all(together[place] is c for place, c in ended)


def test_a_group_is_one_prefill_and_equals_separate_requests(tools):
    made, tree = tools.machine(tools.plain, slots=6, share=3)
    seen = []
    counted = type(made)(**{**vars(made), "prefill": lambda *a: seen.append(1) or made.prefill(*a)})
    group = generate_all(counted, tree, [Request(PROMPTS[1], seed=4, samples=8, max_tokens=6)])
    assert len(seen) == 1
    assert len({tuple(c.ids) for c in group}) == 8  # other samples, not copies
    single, tree = tools.machine(tools.plain)
    first = generate_all(single, tree, [Request(PROMPTS[1], seed=4, max_tokens=6)])[0]
    same(group[0], first)


def test_limit_counts_tokens_and_stop_ids_end_with_the_stop_token(tools):
    made, tree = tools.machine(tools.plain)
    free = generate_all(made, tree, [Request(PROMPTS[4], seed=8, max_tokens=40)])[0]
    assert len(free.ids) == 40 and free.stop_reason == "length"
    assert len(free.logp) == len(free.logp_full) == len(free.version) == 40
    stops = (int(free.ids[25]), int(free.ids[12]))
    place = min(int(np.flatnonzero(free.ids == s)[0]) for s in stops)
    ended = generate_all(made, tree, [Request(PROMPTS[4], seed=8, max_tokens=40, stop_ids=stops)])[
        0
    ]
    np.testing.assert_array_equal(ended.ids, free.ids[: place + 1])
    assert ended.stop_reason == "stop"
    # The stop token as the last one allowed is a stop, not a truncation.
    exact = Request(PROMPTS[4], seed=8, max_tokens=place + 1, stop_ids=stops)
    assert generate_all(made, tree, [exact])[0].stop_reason == "stop"


def test_slots_are_refilled_as_sequences_end(tools):
    # One long request and eight short ones in two slots: the long one bounds the number of calls.
    made, tree = tools.machine(tools.plain, slots=2)
    batcher = Batcher(made)
    batcher.submit(Request(PROMPTS[0], seed=0, max_tokens=56))
    for i in range(8):
        batcher.submit(Request(PROMPTS[2], seed=i, max_tokens=6))
    tokens, calls, done = 0, 0, []
    while batcher.busy:
        done += batcher.step(tree)
        calls += 1
    tokens = sum(len(c.ids) for _, c in done)
    assert tokens == 56 + 8 * 6 and len(done) == 9
    assert done[-1][0] == 0  # the long one ends last: 48 of its 56 steps had a neighbour
    assert calls <= 8 + 56 // 7 + 1


def test_every_token_carries_the_version_of_its_weights(tools):
    made, tree = tools.machine(tools.plain)
    batcher = Batcher(made)
    batcher.submit(Request(PROMPTS[0], seed=0, max_tokens=17))
    done, version = [], 3
    while batcher.busy:
        done += batcher.step(tree, version)
        version += 1
    np.testing.assert_array_equal(done[0][1].version, [3] * 7 + [4] * 7 + [5] * 3)


def test_an_interrupted_completion_ends_like_one_that_was_not(tools):
    # Limit 40, stopped at 24, taken up: 16 more tokens, the same ones, the same reason.
    made, tree = tools.machine(tools.plain, prompt_buckets=(4, 32), cache_length=32 + 64)
    whole = generate_all(made, tree, [Request(PROMPTS[2], seed=5, max_tokens=40)])[0]
    rest = Request(PROMPTS[2], seed=5, max_tokens=40, written=whole.ids[:24].tolist())
    resumed = generate_all(made, tree, [rest])[0]
    np.testing.assert_array_equal(resumed.ids, whole.ids[24:])
    np.testing.assert_allclose(resumed.logp, whole.logp[24:], atol=1e-5)
    assert len(resumed.ids) == 16 and resumed.stop_reason == whole.stop_reason == "length"


def test_banned_ids_are_never_sampled_and_stay_in_the_full_softmax(tools):
    free, tree = tools.machine(tools.plain)
    banned = tuple(range(0, 61, 2))
    made, tree = tools.machine(tools.plain, banned=banned)
    request = Request(PROMPTS[0], seed=1, samples=4, max_tokens=20)
    kept, all_ = generate_all(made, tree, [request]), generate_all(free, tree, [request])
    assert not set(np.concatenate([c.ids for c in kept])) & set(banned)
    assert set(np.concatenate([c.ids for c in all_])) & set(banned)
    assert all((c.logp > c.logp_full).all() for c in kept)  # fewer ids share the mass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1] * 11}, "has 11 tokens and the largest of prompt_buckets is 10"),
        ({"max_tokens": 81}, "more than the 80 positions that cache_length=90 leaves"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"samples": 0}, "samples is 0"),
        ({"prompt": [61]}, "ids outside 0..60"),
        ({"stop_ids": tuple(range(1025))}, "1025 stop ids; the engine holds 1024"),
        ({"written": [1, 2], "max_tokens": 2}, "nothing is left"),
        ({"written": [1], "samples": 2}, "belong to one sample"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_any_work(tools, change, message):
    made, tree = tools.machine(tools.plain)
    good = Request(PROMPTS[0], max_tokens=4)
    bad = Request(**{"prompt": PROMPTS[0], **change})
    ended = []
    with pytest.raises(ValueError, match=message):
        generate_all(made, tree, [good, bad], on_done=lambda *a: ended.append(a))
    assert not ended
