"""Blocks and windows that come back from host memory are those of a cold run, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepinfer.cache.host_tier import StateKind, StateName
from deepinfer.device.errors import ContractError
from deepinfer.engine.engine_stats import EngineStats
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.state_copies import DeviceStateCopies, HostBytes, SavedWindow
from deepinfer.engine.worker import Worker

MakeEngine = Callable[..., LLMEngine]
Ask = Callable[..., dict[str, RequestOutput]]
BLOCK, WINDOW = 4, 8  # of tiny_a
TIER: dict[str, object] = {
    "cache.block_size": BLOCK,
    "cache.prefix": True,
    "cache.host_memory": "64MiB",
}
# Fewer blocks than two of the prompts need: whoever comes next evicts the one before.
SCARCE: dict[str, object] = TIER | {"cache.num_blocks": 30}


def text(family: int, length: int) -> list[int]:
    return [(11 * j + j * j + 29 * family) % 311 + 5 for j in range(length)]


def params(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def tokens(ask: Ask, engine: LLMEngine, prompt: list[int], max_tokens: int = 4) -> list[int]:
    return ask(engine, {"r": (prompt, params(max_tokens))})["r"].outputs[0].token_ids


def change(before: EngineStats, after: EngineStats, field: str) -> int:
    return int(getattr(after, field)) - int(getattr(before, field))


@pytest.mark.parametrize("extra", [1, BLOCK, BLOCK + 1, 40])
@pytest.mark.parametrize("length", [WINDOW + 1, 2 * WINDOW, 63, 64, 65, 90])
def test_a_prompt_goes_on_where_an_earlier_one_ended(
    length: int, extra: int, make_engine: MakeEngine, ask: Ask
) -> None:
    """With windows at hand nothing is computed again, however short the hit."""
    engine, cold = make_engine(**TIER), make_engine()
    family = 100 * length + extra
    tokens(ask, engine, text(family, length), max_tokens=1)
    before = engine.stats()
    prompt = text(family, length + extra)
    assert tokens(ask, engine, prompt) == tokens(ask, cold, prompt)
    known = (length - 1) // BLOCK * BLOCK
    is_hit = known > WINDOW
    found = length // BLOCK * BLOCK if is_hit else 0
    assert change(before, engine.stats(), "num_loaded_windows") == is_hit
    assert change(before, engine.stats(), "prefix_hit_tokens") == (known if is_hit else 0)
    assert change(before, engine.stats(), "replayed_tokens") == (found - known if is_hit else 0)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"scheduler.prefill_chunk_tokens": 1, "cache.num_blocks": 14},
        {"scheduler.prefill_chunk_tokens": 7, "scheduler.async_depth": 0},
        {"scheduler.async_depth": 2, "backend.options": {"runtime": "thread"}},
        {"scheduler.async_depth": 1, "backend.options": {"runtime": "adversarial"}},
        {"scheduler.async_depth": 2, "backend.options": {"runtime": "adversarial"}},
        {"checkpoint.path": None, "numerics": "normative", "cache.num_blocks": 40},
        {"speculation.mode": "fixed", "speculation.max_drafts": 3},
        {
            "speculation.mode": "fixed",
            "speculation.max_drafts": 5,
            "backend.options": {"runtime": "adversarial"},
        },
    ],
    ids=lambda variant: ",".join(str(value) for value in variant.values()),
)
def test_what_the_device_forgot_comes_back(
    variant: dict[str, object], make_engine: MakeEngine, ask: Ask
) -> None:
    engine = make_engine(**SCARCE | variant)
    same = {
        name: value for name, value in variant.items() if name in ("checkpoint.path", "numerics")
    }
    cold = make_engine(**same)
    num_blocks = engine.stats().kv_total_blocks
    prompts = [text(family, 2 * num_blocks + family) for family in range(3)]
    expected = [tokens(ask, cold, prompt) for prompt in prompts]
    for _ in range(2):
        before = engine.stats()
        for prompt, answer in zip(prompts, expected, strict=True):
            assert tokens(ask, engine, prompt) == answer
    assert change(before, engine.stats(), "num_loaded_blocks") >= num_blocks
    assert change(before, engine.stats(), "num_loaded_windows") == 3
    # At most the rest of the last block is computed.
    assert change(before, engine.stats(), "prefix_hit_tokens") >= sum(map(len, prompts)) - 3 * BLOCK


@pytest.mark.parametrize(
    ("runtime", "depth"), [("inline", 0), ("inline", 1), ("adversarial", 1), ("adversarial", 2)]
)
def test_in_company_and_with_preemptions(
    runtime: str, depth: int, make_engine: MakeEngine, ask: Ask
) -> None:
    scarce = SCARCE | {"backend.options": {"runtime": runtime}, "scheduler.async_depth": depth}
    engine, cold = make_engine(**scarce), make_engine()
    asked = {f"r{i}": (text(i % 3, 30 + 7 * i), params(8)) for i in range(5)}
    expected = {name: result.outputs for name, result in ask(cold, asked).items()}
    for _ in range(2):
        found = {name: result.outputs for name, result in ask(engine, asked).items()}
        assert found == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_loaded_blocks > 0
    assert engine.stats().num_loaded_windows > 0


def test_the_rebuilding_after_a_hit_is_paid_once(make_engine: MakeEngine, ask: Ask) -> None:
    """A beginning that three prompts share, each going on in its own way."""
    engine, cold = make_engine(**TIER), make_engine()
    prompts = [[*text(50, 100), *text(51 + i, 9)] for i in range(3)]
    replayed = []
    for prompt in prompts:
        before = engine.stats()
        assert tokens(ask, engine, prompt) == tokens(ask, cold, prompt)
        replayed.append(change(before, engine.stats(), "replayed_tokens"))
    assert replayed == [0, 64, 0]


def test_a_next_turn_begins_after_the_answer(make_engine: MakeEngine, ask: Ask) -> None:
    engine, cold = make_engine(**TIER), make_engine()
    prompt = text(60, 21)
    first = tokens(ask, engine, prompt, max_tokens=12)
    before = engine.stats()
    longer = [*prompt, *first, 9, 9]
    assert tokens(ask, engine, longer) == tokens(ask, cold, longer)
    # The last token of an answer is not computed, and its last full block ends at 32.
    assert change(before, engine.stats(), "prefix_hit_tokens") == 32


def test_drafts_after_loaded_windows_are_those_of_a_cold_run(make_engine: MakeEngine) -> None:
    """The drafter's window comes back, too: every step accepts as many drafts."""
    drafting = TIER | {
        "checkpoint.path": None,
        "scheduler.async_depth": 0,
        "speculation.mode": "fixed",
        "speculation.max_drafts": 5,
    }
    engine = make_engine(**drafting)
    prompt = engine.tokenizer.encode("Once upon a time there was a king. " * 6)
    lengths: list[list[int]] = []
    for _ in range(2):
        engine.add_request("r", prompt, params(24))
        lengths.append([])
        while engine.has_unfinished():
            lengths[-1] += [len(output.outputs[0].token_ids) for output in engine.step()]
    assert engine.stats().num_loaded_windows == 1
    assert len(lengths[0]) < 24, "no draft was accepted"
    assert lengths[1] == lengths[0]


def test_a_running_answer_keeps_no_loaded_state(make_engine: MakeEngine, ask: Ask) -> None:
    """What the tier has evicted is free, however long the answer runs."""
    engine = make_engine(**SCARCE)
    for family in (90, 91):
        tokens(ask, engine, text(family, 100))
    engine.add_request("r", text(90, 100), params(9))
    before = engine.stats().num_loaded_windows
    engine.step()
    (sequence,) = engine._scheduler.running
    assert engine.stats().num_loaded_windows == before + 1
    assert (sequence.hit.saved, sequence.hit.window, sequence.hit.has_window) == ((), None, True)
    while engine.has_unfinished():
        engine.step()


def test_host_memory_is_limited_in_bytes(make_engine: MakeEngine, ask: Ask) -> None:
    worker = make_engine(**TIER)._runner
    assert isinstance(worker, Worker)
    room = 20 * worker.copies.block_bytes
    engine = make_engine(**TIER | {"cache.host_memory": room})
    for family in range(70, 74):
        tokens(ask, engine, text(family, 60))
        assert 0 < engine.stats().host_used_bytes <= room


def test_states_are_the_same_bytes_in_every_engine(make_engine: MakeEngine, ask: Ask) -> None:
    """Whatever the chunks, depth, slots and place in the ring: what a store could exchange."""
    digests = []
    for variant in ({}, {"scheduler.prefill_chunk_tokens": 3, "scheduler.async_depth": 2}):
        engine = make_engine(**TIER | variant)
        tokens(ask, engine, text(80, 41))
        reuse = engine._scheduler.reuse
        assert reuse is not None
        assert reuse.tier is not None
        names = list[bytes]()
        reuse.cache.name_blocks(names, text(80, 40))
        wanted = [StateName(StateKind.BLOCK, name) for name in names]
        wanted.append(StateName(StateKind.WINDOW, names[-1]))
        states = [reuse.tier.tier.find(name) for name in wanted]
        digests.append([state.checksum() for state in states if isinstance(state, HostBytes)])
        assert len(set(digests[-1])) == 11
    assert digests[0] == digests[1]


def test_a_state_of_another_layout_is_refused(make_engine: MakeEngine) -> None:
    worker = make_engine(**TIER)._runner
    assert isinstance(worker, Worker)
    copies = worker.copies
    assert isinstance(copies, DeviceStateCopies)
    foreign = HostBytes("another record", torch.zeros(copies.block_bytes, dtype=torch.uint8))
    with pytest.raises(ContractError, match="'another record' cannot be loaded"):
        copies.load([(foreign, 0)], None)
    with pytest.raises(ContractError, match="'another record' cannot be loaded"):
        copies.load([], SavedWindow(foreign, 0, WINDOW))
