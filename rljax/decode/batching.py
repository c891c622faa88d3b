"""The host loop around the engine: continuous batching of requests over slots."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from rljax.decode.engine import Engine, Slots
from rljax.decode.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how to complete it.

    Attributes:
      prompt: token ids. samples: completions wanted; they share one prefill.
      seed: decides what is sampled, whatever else is decoded beside it.
      max_tokens: most new tokens. stop_ids: ids that end a completion (and are its last token).
      temperature: 0 = greedy. top_k, top_p, min_p: 0, 1, 0 = off; see `sampling.Sampling`.
    """

    prompt: Sequence[int]
    seed: int = 0
    samples: int = 1
    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled completion of n tokens, its stop token included.

    Attributes:
      ids: [n] int32. logp: [n] float32, of each token under the distribution sampled from.
      logp_full: [n] float32, under the full softmax at temperature 1.
      version: [n] int32, of the weights that sampled the token.
    """

    ids: np.ndarray
    logp: np.ndarray
    logp_full: np.ndarray
    version: np.ndarray
    stop_reason: Literal["stop", "length"]


def check(engine: Engine, request: Request) -> None:
    """Raises ValueError where a request does not fit the engine, saying which setting to change."""
    r, cfg, n = request, engine.cfg, len(request.prompt)
    facts = [
        (n < 1, "a prompt needs at least one token"),
        (n > cfg.prompt_buckets[-1], f"the prompt has {n} tokens and the largest of prompt_buckets "
         f"is {cfg.prompt_buckets[-1]}; shorten it or raise the bucket"),
        (n + r.max_tokens > cfg.cache_length, f"{n} prompt tokens and max_tokens={r.max_tokens} are "
         f"more than cache_length={cfg.cache_length}; lower max_tokens or raise cache_length"),
        (r.max_tokens < 1, f"max_tokens is {r.max_tokens}; use 1 or more"),
        (r.samples < 1, f"samples is {r.samples}; use 1 or more"),
        (r.temperature < 0, f"temperature is {r.temperature}; use 0 (greedy) or more"),
        (r.top_k < 0, f"top_k is {r.top_k}; use 0 (off) or more"),
        (not 0 < r.top_p <= 1, f"top_p is {r.top_p}; use a value in (0, 1]"),
        (not 0 <= r.min_p <= 1, f"min_p is {r.min_p}; use a value in [0, 1]"),
        (len(r.stop_ids) > cfg.stop_ids, f"{len(r.stop_ids)} stop ids; the engine holds "
         f"{cfg.stop_ids}; raise EngineConfig.stop_ids"),
        (any(not 0 <= i < engine.model.vocab_used for i in r.prompt), "the prompt has ids outside "
         f"0..{engine.model.vocab_used - 1}; encode it with the model's own tokenizer"),
    ]  # fmt: skip
    for wrong, message in facts:
        if wrong:
            raise ValueError(message)


def generate_all(
    engine: Engine,
    tree: Any,
    requests: Sequence[Request],
    *,
    version: int = 0,
    on_done: Callable[[int, Completion], None] | None = None,
) -> list[Completion]:
    """Completes all requests; slots are refilled as sequences end.

    Args:
      tree: `engine.prepare(params)`.
      version: number of the weights, stamped on every token.
      on_done: called with the place in the result and the completion, as each one ends.

    Returns:
      One completion a sample, in the order of the requests, samples of a request side by side.
    """
    for r in requests:
        check(engine, r)
    B, state = engine.cfg.slots, engine.init_state()
    starts = np.cumsum([0] + [r.samples for r in requests])
    waiting = collections.deque((i, s) for i, r in enumerate(requests) for s in range(r.samples))
    owner: list[tuple[int, int] | None] = [None] * B
    parts: dict[int, list[tuple]] = {}
    done: list[Completion | None] = [None] * int(starts[-1])
    prefixes: dict[int, tuple[Any, int]] = {}
    while waiting or any(owner):
        free = [b for b in range(B) if owner[b] is None]
        chosen = [waiting.popleft() for _ in range(min(len(free), len(waiting)))]
        if chosen:
            _prefill(engine, tree, requests, [i for i, _ in chosen], prefixes)
            state = _insert(engine, state, requests, chosen, free, prefixes)
            for slot, job in zip(free, chosen):
                owner[slot] = job
            ahead = waiting[0][0] if waiting else len(requests)
            prefixes = {i: p for i, p in prefixes.items() if i >= ahead}
        state, result = engine.generate(tree, state)
        out = jax.device_get(result)
        for b, job in enumerate(owner):
            if job is None:
                continue
            place = int(starts[job[0]]) + job[1]
            valid = out.valid[:, b]
            columns = (out.token[valid, b], out.logp[valid, b], out.logp_full[valid, b])
            parts.setdefault(place, []).append(columns)
            if not out.active[b]:
                ids, logp, full = (np.concatenate(c) for c in zip(*parts.pop(place)))
                ended = int(ids[-1]) in requests[job[0]].stop_ids
                completion = Completion(
                    ids, logp, full, np.full(len(ids), version, np.int32),
                    "stop" if ended else "length",
                )  # fmt: skip
                done[place], owner[b] = completion, None
                if on_done is not None:
                    on_done(place, completion)
    return done  # pyright: ignore[reportReturnType]


def _prefill(
    engine: Engine, tree: Any, requests: Sequence[Request], wanted: list[int], prefixes: dict
) -> None:
    """Adds to `prefixes` the caches of the wanted requests, several a call, bucket by bucket."""
    rows = engine.cfg.prefill_rows
    new = [i for i in dict.fromkeys(wanted) if i not in prefixes]
    by_bucket: dict[int, list[int]] = {}
    for i in new:
        n = len(requests[i].prompt)
        by_bucket.setdefault(min(b for b in engine.cfg.prompt_buckets if b >= n), []).append(i)
    for bucket, members in by_bucket.items():
        for first in range(0, len(members), rows):
            part = members[first : first + rows]
            tokens, length = np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32)
            for row, i in enumerate(part):
                length[row] = len(requests[i].prompt)
                tokens[row, : length[row]] = requests[i].prompt
            filled = engine.prefill(tree, tokens, length)  # pyright: ignore[reportArgumentType]
            prefixes.update({i: (filled, row) for row, i in enumerate(part)})


def _insert(
    engine: Engine,
    state: Any,
    requests: Sequence[Request],
    jobs: list[tuple[int, int]],
    free: list[int],
    prefixes: dict,
) -> Any:
    """Puts each job into a free slot; one call for each prefill it comes from."""
    B, n_stop = engine.cfg.slots, engine.cfg.stop_ids
    by_cache: dict[int, list[tuple[int, int, int]]] = {}
    for slot, (i, s) in zip(free, jobs):
        by_cache.setdefault(id(prefixes[i][0]), []).append((slot, i, s))
    for members in by_cache.values():
        count = np.zeros((7, B), np.int32)
        real = np.zeros((3, B), np.float32)
        stop = np.full((B, n_stop), -1, np.int32)
        rows, slots = np.zeros(B, np.int32), np.full(B, B, np.int32)
        for at, (slot, i, s) in enumerate(members):
            r = requests[i]
            rows[at], slots[at] = prefixes[i][1], slot
            n = len(r.prompt)
            # The last prompt token is fed again, which gives the first token's distribution.
            count[:, at] = (r.prompt[-1], n - 1, 0, r.max_tokens, 1, s, r.top_k)
            real[:, at] = (r.temperature, r.top_p, r.min_p)
            stop[at, : len(r.stop_ids)] = r.stop_ids
        seed = np.zeros(B, np.uint32)
        seed[: len(members)] = [requests[i].seed & 0xFFFFFFFF for _, i, _ in members]
        new: Any = dict(
            token=count[0], position=count[1], index=count[2], limit=count[3],
            active=count[4] > 0, seed=seed, sample=count[5], stop_ids=stop,
        )  # fmt: skip
        settings: Any = dict(temperature=real[0], top_k=count[6], top_p=real[1], min_p=real[2])
        arrays: Any = (rows, slots)
        fields = Slots(**new, sampling=Sampling(**settings))
        state = engine.insert(state, prefixes[members[0][1]][0], *arrays, fields)
    return state
