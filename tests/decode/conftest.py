"""A model small enough to decode in a test, with every switch that decoding has to respect."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.decode import engine
from rljax.models import decoder, heads, spec
from rljax.sharding import rules

PLAIN = spec.ModelConfig("llama", 61, 61, 24, 2, 6, 2, 4, 40)
# Windowed layers, soft caps, q/k norms, a padded vocabulary, an untied head.
ODD = spec.ModelConfig(
    "gemma3_text", 64, 59, 16, 3, 4, 2, 8, 24, qk_norm=True, post_norms=True, norm_plus_one=True,
    attention_softcap=5.0, logit_softcap=4.0, window=3, local=(True, False, True), tied=False,
    activation="gelu_tanh", rope_theta_local=100.0,
)  # fmt: skip


@functools.cache
def weights(cfg):
    """Parameters large enough that logits differ by several units."""
    params = spec.init(spec.specs(cfg), key=jax.random.key(7))
    return jax.tree.map(lambda x: x * 12 if x.ndim > 1 and x.std() > 0 else x, params)


@functools.cache
def full_logits(cfg):
    """Jitted logits [S, V] of one whole sequence: no cache, no padding but after the end."""

    @jax.jit
    def run(ids):
        positions = jnp.arange(ids.shape[0])[None]
        x, _ = decoder.hidden(weights(cfg), cfg, ids[None], positions, decoder.causal(cfg))
        return heads.logits(weights(cfg), cfg, x)[0]

    def padded(ids):
        room = np.zeros(96, np.int32)
        room[: len(ids)] = ids
        return np.asarray(run(room))[: len(ids)]

    return padded


def machine(cfg, form="unrolled", **options):
    """An engine and its tree; made once, because each costs a compilation."""
    return _machine(cfg, form, **options)


@functools.cache
def _machine(cfg, form, **options):
    sizes = {"slots": 4, "cache_length": 10 + 80, "prompt_buckets": (4, 10), "steps_per_call": 7}
    config = engine.EngineConfig(**{**sizes, **options})
    made = engine.make_engine(cfg, config, rules.single(), form=form)
    return made, made.prepare(weights(cfg))


@pytest.fixture(autouse=True)
def quick():
    """Half the time to compile; what a test decodes takes no time to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def tools():
    """The helpers above, as a namespace."""

    class Tools:
        plain, odd = PLAIN, ODD

    Tools.weights, Tools.full_logits = staticmethod(weights), staticmethod(full_logits)
    Tools.machine = staticmethod(machine)
    return Tools
