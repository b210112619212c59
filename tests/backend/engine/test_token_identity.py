"""The same request gives the same tokens in every company and every way of running."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams

MakeEngine = Callable[..., LLMEngine]
Ask = Callable[..., dict[str, RequestOutput]]
CHECKPOINTS: dict[str, dict[str, object]] = {"tiny_a": {}, "bundled": {"checkpoint.path": None}}
VARIANTS: dict[str, dict[str, object]] = {
    "chunk 1": {"scheduler.prefill_chunk_tokens": 1},
    "chunk 7": {"scheduler.prefill_chunk_tokens": 7},
    "few rows": {"scheduler.max_num_seqs": 4, "scheduler.max_num_tokens": 9},
    "one at a time": {"scheduler.max_num_seqs": 1},
    "blocks of 2": {"cache.block_size": 2},
    "blocks of 64": {"cache.block_size": 64},
    "thread": {"backend.options": {"runtime": "thread"}},
    "adversarial": {"backend.options": {"runtime": "adversarial"}, "scheduler.max_num_seqs": 4},
    "depth 0": {"scheduler.async_depth": 0},
    "depth 2": {"scheduler.async_depth": 2},
    # P40: a rule that only one depth follows shows where chunks and depth meet.
    "depth 0, chunk 1": {"scheduler.async_depth": 0, "scheduler.prefill_chunk_tokens": 1},
    "depth 0, chunk 7": {"scheduler.async_depth": 0, "scheduler.prefill_chunk_tokens": 7},
    "depth 2, chunk 1": {"scheduler.async_depth": 2, "scheduler.prefill_chunk_tokens": 1},
    "depth 2, chunk 7, adversarial": {
        "scheduler.async_depth": 2,
        "scheduler.prefill_chunk_tokens": 7,
        "scheduler.max_num_seqs": 3,
        "backend.options": {"runtime": "adversarial"},
    },
}
# Prompts of 1 to 22 tokens: eight of them, so that one at a time stays quick.
NUM_PROMPTS, MAX_TOKENS = 8, 8
Tokens = list[list[int]]


def _params(temperature: float, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=100 + index, max_tokens=MAX_TOKENS, ignore_eos=True
    )


def _tokens(
    ask: Ask,
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    temperature: float,
    order: Sequence[int] | None = None,
) -> Tokens:
    indices = range(len(prompts)) if order is None else order
    asked = {f"r{i}": (prompts[i], _params(temperature, i)) for i in indices}
    results = ask(engine, asked)
    return [results[f"r{i}"].outputs[0].token_ids for i in range(len(prompts))]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("numerics", ["exact", "normative"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_do_not_depend_on_steps_blocks_or_runtime(
    checkpoint: str,
    numerics: str,
    temperature: float,
    make_engine: MakeEngine,
    ask: Ask,
    prompts: Sequence[list[int]],
) -> None:
    base = CHECKPOINTS[checkpoint] | {"numerics": numerics}
    few = prompts[:NUM_PROMPTS]
    expected = _tokens(ask, make_engine(**base), few, temperature)
    assert all(len(tokens) == MAX_TOKENS for tokens in expected)
    # Sampling differs from the greedy run after the logits only, which is the same in all cells.
    variants = VARIANTS if temperature == 0.0 and checkpoint == "tiny_a" else _SHORT_LIST
    for name, overrides in variants.items():
        found = _tokens(ask, make_engine(**base, **overrides), few, temperature)
        assert found == expected, name


_SHORT_LIST = {name: VARIANTS[name] for name in ("chunk 7", "few rows", "depth 0", "depth 2")}


@pytest.mark.parametrize("numerics", ["exact", "normative"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("runtime", "depth"), [("inline", 0), ("inline", 1), ("adversarial", 1), ("adversarial", 2)]
)
def test_preemption_does_not_change_tokens(
    numerics: str,
    temperature: float,
    runtime: str,
    depth: int,
    make_engine: MakeEngine,
    ask: Ask,
    prompts: Sequence[list[int]],
) -> None:
    few = prompts[:NUM_PROMPTS]
    ample = make_engine(numerics=numerics)
    scarce = make_engine(
        **{
            "numerics": numerics,
            "backend.options": {"runtime": runtime},
            "scheduler.async_depth": depth,
            "cache.block_size": 4,
            "cache.num_blocks": 14,
        }
    )
    before = scarce.stats().num_preemptions
    found = _tokens(ask, scarce, few, temperature)
    assert scarce.stats().num_preemptions > before
    assert found == _tokens(ask, ample, few, temperature)


def test_order_and_batch_limit_do_not_change_seeded_tokens(
    make_engine: MakeEngine, ask: Ask, prompts: Sequence[list[int]]
) -> None:
    """P41."""
    short = [prompt[:5] for prompt in prompts]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=5) for i in range(16)]

    def tokens(limit: int, order: Sequence[int]) -> Tokens:
        asked = {f"r{i}": (short[i], params[i]) for i in order}
        results = ask(make_engine(**{"scheduler.max_num_seqs": limit}), asked)
        return [results[f"r{i}"].outputs[0].token_ids for i in range(16)]

    expected = tokens(16, range(16))
    assert len({tuple(entry) for entry in expected}) > 1
    shuffler = random.Random(0)
    for limit in (16, 16, 4, 4, 1):
        order = shuffler.sample(range(16), 16)
        assert tokens(limit, order) == expected, (limit, order)
