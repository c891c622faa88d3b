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
      written: the first tokens of a completion that was interrupted. It is taken up after them as
        if it had not been, within the same `max_tokens`; the result has the tokens that follow.
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
    written: Sequence[int] = ()

    @property
    def prefix(self) -> list[int]:
        """Tokens to be prefilled."""
        return [*self.prompt, *self.written]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled completion of n tokens, its stop token included.

    Attributes:
      ids: [n] int32. logp: [n] float32, of each token under the distribution sampled from.
      logp_full: [n] float32, under the full softmax at temperature 1.
      version: [n] int32, of the weights that sampled the token.
      topk_ids: [n, K] int32, the likeliest ids as the token was sampled, -1 = empty slot; None
        unless `EngineConfig.topk` is set. topk_logp: [n, K] float32, as `logp`, 0 where empty.
    """

    ids: np.ndarray
    logp: np.ndarray
    logp_full: np.ndarray
    version: np.ndarray
    stop_reason: Literal["stop", "length"]
    topk_ids: np.ndarray | None = None
    topk_logp: np.ndarray | None = None


def check(engine: Engine, request: Request) -> None:
    """Raises ValueError where a request does not fit the engine, saying which setting to change."""
    r, cfg, n, used = request, engine.cfg, len(request.prefix), engine.model.vocab_used
    largest, room = cfg.prompt_buckets[-1], cfg.completion_length
    left = r.max_tokens - len(r.written)
    stray = [i for i in r.prefix if not 0 <= i < used]
    facts = [
        (not r.prompt, "a prompt needs at least one token"),
        (
            n > largest,
            f"the prompt has {n} tokens and the largest of prompt_buckets is {largest}; shorten "
            f"it, or raise the bucket to {n} and cache_length to {n + room}",
        ),
        (r.max_tokens < 1, f"max_tokens is {r.max_tokens}; use 1 or more"),
        (
            left < 1,
            f"{len(r.written)} tokens are written and max_tokens is {r.max_tokens}: nothing is "
            "left to sample; raise max_tokens or take the completion as it is",
        ),
        (
            left > room,
            f"max_tokens={r.max_tokens} is more than the {room} positions that cache_length="
            f"{cfg.cache_length} leaves beside the largest prompt bucket of {largest}; lower "
            f"max_tokens to {room + len(r.written)} or raise cache_length to {largest + left}",
        ),
        (r.samples < 1, f"samples is {r.samples}; use 1 or more"),
        (
            r.samples > 1 and bool(r.written),
            f"samples is {r.samples} with tokens written: these belong to one sample; make one "
            "request for each",
        ),
        (not r.temperature >= 0, f"temperature is {r.temperature}; use 0 (greedy) or more"),
        (r.top_k < 0, f"top_k is {r.top_k}; use 0 (off) or more"),
        (not 0 < r.top_p <= 1, f"top_p is {r.top_p}; use a value in (0, 1]"),
        (not 0 <= r.min_p <= 1, f"min_p is {r.min_p}; use a value in [0, 1]"),
        (
            len(r.stop_ids) > cfg.stop_ids,
            f"{len(r.stop_ids)} stop ids; the engine holds {cfg.stop_ids}; raise "
            "EngineConfig.stop_ids",
        ),
        (
            bool(stray),
            f"the prompt has ids outside 0..{used - 1}: {stray[:5]}; encode it with the model's "
            "own tokenizer",
        ),
    ]
    for wrong, message in facts:
        if wrong:
            raise ValueError(message)


@dataclasses.dataclass
class _Job:
    """Samples first ... first + count - 1 of a request, in one block of slots."""

    place: int  # of the first sample, in the order of submission
    request: Request
    first: int
    count: int
    parts: list[list[tuple]] = dataclasses.field(default_factory=list)  # by sample, by call
    left: int = 0  # samples that go on


class Batcher:
    """Requests waiting and running. `submit` at any time; each `step` is one device call."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._state = engine.init_state()
        self._waiting: collections.deque[_Job] = collections.deque()
        self._running: list[_Job | None] = [None] * engine.cfg.blocks
        self._prefixes: dict[int, tuple[Any, int]] = {}  # by id of the request
        self._places = 0

    @property
    def busy(self) -> bool:
        """Whether anything is waiting or running."""
        return bool(self._waiting) or any(self._running)

    def submit(self, request: Request) -> int:
        """Queues a request; returns the place of its first sample, numbered from 0.

        Raises:
          ValueError: if the request does not fit the engine, see `check`.
        """
        check(self.engine, request)
        place, share = self._places, self.engine.cfg.share
        for first in range(0, request.samples, share):
            count = min(share, request.samples - first)
            self._waiting.append(_Job(place + first, request, first, count))
        self._places += request.samples
        return place

    def step(self, tree: Any, version: int = 0) -> list[tuple[int, Completion]]:
        """Fills free slots, decodes up to `steps_per_call` tokens; what ended, with its place.

        With requests waiting it returns as soon as a block of slots is free.

        Args:
          tree: `engine.prepare(params)`. version: number of these weights, stamped on the tokens.
        """
        self._fill(tree)
        idle = sum(job is None for job in self._running)
        enough = idle + 1 if self._waiting else len(self._running)
        self._state, result = self.engine.generate(tree, self._state, np.int32(enough))
        out = jax.device_get(result)
        done = []
        for block, job in enumerate(self._running):
            if job is None:
                continue
            for s in range(job.count):
                slot = block * self.engine.cfg.share + s
                valid = out.valid[:, slot]
                if not valid.any():
                    continue
                columns = (out.token, out.logp, out.logp_full)
                if self.engine.cfg.topk:
                    columns = (*columns, out.topk_ids, out.topk_logp)
                columns = tuple(x[valid, slot] for x in columns)
                job.parts[s].append((np.full(valid.sum(), version, np.int32), *columns))
                if not out.active[slot]:
                    whole = (np.concatenate(c) for c in zip(*job.parts[s]))
                    versions, ids, logp, full, *top = whole
                    reason = "stop" if int(ids[-1]) in job.request.stop_ids else "length"
                    completion = Completion(ids, logp, full, versions, reason, *top)
                    done.append((job.place + s, completion))
                    job.left -= 1
            if not job.left:
                self._running[block] = None
        return done

    def _fill(self, tree: Any) -> None:
        """Prefills and inserts waiting jobs while blocks are free."""
        free = [b for b, job in enumerate(self._running) if job is None]
        chosen = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        if not chosen:
            return
        requests = {id(j.request): j.request for j in chosen if id(j.request) not in self._prefixes}
        self._prefill(tree, list(requests.values()))
        by_prefix: dict[int, list[tuple[int, _Job]]] = {}
        for block, job in zip(free, chosen):
            job.parts, job.left = [[] for _ in range(job.count)], job.count
            self._running[block] = job
            prefix, _ = self._prefixes[id(job.request)]
            by_prefix.setdefault(id(prefix), []).append((block, job))
        for members in by_prefix.values():
            prefix, _ = self._prefixes[id(members[0][1].request)]
            self._state = self.engine.insert(self._state, prefix, *self._fields(members))
        later = {id(job.request) for job in self._waiting}
        self._prefixes = {i: p for i, p in self._prefixes.items() if i in later}

    def _prefill(self, tree: Any, requests: list[Request]) -> None:
        """Adds the requests' prefixes, several a call, bucket by bucket."""
        rows = self.engine.cfg.prefill_rows
        by_bucket: dict[int, list[Request]] = {}
        for r in requests:
            n = len(r.prefix)
            bucket = min(b for b in self.engine.cfg.prompt_buckets if b >= n)
            by_bucket.setdefault(bucket, []).append(r)
        for bucket, members in by_bucket.items():
            for first in range(0, len(members), rows):
                part = members[first : first + rows]
                tokens, length = np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32)
                for row, r in enumerate(part):
                    length[row] = len(r.prefix)
                    tokens[row, : length[row]] = r.prefix
                prefix = self.engine.prefill(tree, tokens, length)
                self._prefixes.update({id(r): (prefix, row) for row, r in enumerate(part)})

    def _fields(self, members: list[tuple[int, _Job]]) -> tuple[Any, Any, Slots]:
        """Arguments of `engine.insert` for jobs of one prefill call and their blocks."""
        cfg = self.engine.cfg
        rows, blocks = np.zeros(cfg.blocks, np.int32), np.full(cfg.blocks, cfg.blocks, np.int32)
        ints = np.zeros((8, cfg.slots), np.int32)
        seed = np.zeros(cfg.slots, np.uint32)
        real = np.ones((3, cfg.slots), np.float32)
        stop = np.full((cfg.slots, cfg.stop_ids), -1, np.int32)
        for i, (block, job) in enumerate(members):
            r = job.request
            rows[i], blocks[i] = self._prefixes[id(r)][1], block
            n, done = len(r.prefix), len(r.written)
            for s in range(cfg.share):
                at = i * cfg.share + s
                # The last token is fed again, which gives the next one's distribution.
                going = s < job.count
                ints[:, at] = (
                    r.prefix[-1], n - 1, n, done, r.max_tokens, going, job.first + s, r.top_k
                )  # fmt: skip
                seed[at] = r.seed & 0xFFFFFFFF
                real[:, at] = (r.temperature, r.top_p, r.min_p)
                stop[at, : len(r.stop_ids)] = r.stop_ids
        token, position, length, index, limit, going, sample, top_k = ints
        arrays: Any = {
            "token": token, "position": position, "prompt_length": np.maximum(length, 1),
            "index": index, "limit": limit, "active": going > 0, "seed": seed, "sample": sample,
            "stop_ids": stop,
        }  # fmt: skip
        settings: Any = {"temperature": real[0], "top_k": top_k, "top_p": real[1], "min_p": real[2]}
        return rows, blocks, Slots(**arrays, sampling=Sampling(**settings))


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

    Raises:
      ValueError: before any work, if a request does not fit the engine, see `check`.
    """
    for r in requests:
        check(engine, r)
    batcher, done = Batcher(engine), {}
    for r in requests:
        batcher.submit(r)
    while batcher.busy:
        for place, completion in batcher.step(tree, version):
            done[place] = completion
            if on_done is not None:
                on_done(place, completion)
    return [done[place] for place in sorted(done)]
