"""Larger versions of the identity tests: every boundary, and crowds of prompts that begin alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams

MakeEngine = Callable[..., LLMEngine]
Ask = Callable[..., dict[str, RequestOutput]]
BLOCK = 4
PREFIX: dict[str, object] = {"cache.block_size": BLOCK, "cache.prefix": True}


def text(family: int, length: int) -> list[int]:
    return [(11 * j + j * j + 29 * family) % 311 + 5 for j in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def tokens(ask: Ask, engine: LLMEngine, prompt: list[int]) -> list[int]:
    return ask(engine, {"r": (prompt, greedy(3))})["r"].outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("host_memory", [0, "64MiB"])
def test_every_boundary(
    chunk: int, depth: int, host_memory: int | str, make_engine: MakeEngine, ask: Ask
) -> None:
    steps = {"scheduler.prefill_chunk_tokens": chunk, "scheduler.async_depth": depth}
    engine = make_engine(**PREFIX | steps | {"cache.host_memory": host_memory})
    cold = make_engine()
    for family, (hit, beyond) in enumerate(itertools.product(range(8, 137, 4), range(6))):
        tokens(ask, engine, text(family, hit))
        prompt = text(family, hit + beyond)
        assert tokens(ask, engine, prompt) == tokens(ask, cold, prompt), (hit, beyond)


def crowd(seed: int, engine: LLMEngine, cold: LLMEngine, ask: Ask) -> None:
    """Waves of prompts and next turns of three families, some of them aborted."""
    choose = random.Random(seed)
    known: list[list[int]] = [text(1000 * seed + family, 100) for family in range(3)]
    for _ in range(3):
        prompts = [
            [*choose.choice(known)[: choose.randint(1, 100)], *text(seed, choose.randint(0, 6))]
            for _ in range(5)
        ]
        asked = {
            f"r{index}": (prompt[:110] or [5], greedy(choose.randint(1, 9)))
            for index, prompt in enumerate(prompts)
        }
        expected = {name: result.outputs for name, result in ask(cold, asked).items()}
        engine.add_request("aborted", choose.choice(prompts), greedy(40))
        for _ in range(choose.randint(0, 5)):
            engine.step()
        engine.abort("aborted")
        found = {name: result.outputs for name, result in ask(engine, asked).items()}
        assert {name: found[name] for name in expected} == expected
        known += [[*asked[name][0], *outputs[0].token_ids] for name, outputs in expected.items()]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))]
)
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_crowds(seed: int, max_drafts: int, make_engine: MakeEngine, ask: Ask) -> None:
    overrides = PREFIX | {
        "cache.num_blocks": 45,
        "cache.host_memory": (0, "200KiB", "64MiB")[seed % 3],
        "backend.options": {"runtime": "adversarial"},
        "scheduler.async_depth": seed % 3,
        "scheduler.prefill_chunk_tokens": (64, 7, 3)[seed % 3],
    }
    if max_drafts:
        overrides |= {"speculation.mode": "fixed", "speculation.max_drafts": max_drafts}
    engine = make_engine(**overrides)
    crowd(seed, engine, make_engine(), ask)
    assert engine.stats().prefix_hit_tokens + engine.stats().replayed_tokens > 0
