"""A prefix hit changes no token: every boundary, chunking, depth and preemption, exact numerics."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import CompletionOutput, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams

MakeEngine = Callable[..., LLMEngine]
Ask = Callable[..., dict[str, RequestOutput]]
BLOCK = 4
WINDOW, REPLAY = 8, 64  # of tiny_a: eight windows, overlapping by one, below the last layer's own
PREFIX: dict[str, object] = {"cache.block_size": BLOCK, "cache.prefix": True}
ADVERSARIAL: dict[str, object] = {"backend.options": {"runtime": "adversarial"}}


def text(family: int, length: int) -> list[int]:
    """Token ids; texts of one family begin alike, those of two differ from the first token on."""
    return [(11 * j + j * j + 29 * family) % 311 + 5 for j in range(length)]


def params(max_tokens: int = 3, **fields: object) -> SamplingParams:
    wanted = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return SamplingParams.model_validate(wanted | fields)


def outputs(results: dict[str, RequestOutput]) -> dict[str, list[CompletionOutput]]:
    return {name: result.outputs for name, result in results.items()}


def answer(
    ask: Ask, engine: LLMEngine, prompt: list[int], max_tokens: int = 3
) -> tuple[list[int], int]:
    """Tokens of a request that runs alone, and how many of its prompt's were not computed."""
    result = ask(engine, {"r": (prompt, params(max_tokens))})["r"]
    return result.outputs[0].token_ids, result.num_cached_tokens


def hit_tokens(engine: LLMEngine) -> int:
    """Tokens of all hits so far, computed again or not."""
    return engine.stats().prefix_hit_tokens + engine.stats().replayed_tokens


@pytest.mark.parametrize("num_beyond", [0, 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize(
    "hit", [WINDOW, WINDOW + BLOCK, 2 * WINDOW, REPLAY - BLOCK, REPLAY, REPLAY + BLOCK, 2 * REPLAY]
)
def test_hits_at_every_boundary(
    hit: int, num_beyond: int, make_engine: MakeEngine, ask: Ask
) -> None:
    """P32, P33: also a prompt that is known as a whole, and lengths around window and block."""
    engine, cold = make_engine(**PREFIX), make_engine()
    family = 1000 * num_beyond + hit
    # The answer's first token is not computed, so exactly `hit` tokens have blocks.
    answer(ask, engine, text(family, hit), max_tokens=1)
    before = hit_tokens(engine)
    prompt = text(family, hit + num_beyond)
    found = answer(ask, engine, prompt)
    assert found == (answer(ask, cold, prompt)[0], max(0, hit - REPLAY))
    assert hit_tokens(engine) - before == (hit if hit > WINDOW else 0)


@pytest.mark.parametrize(
    "variant",
    [
        {"scheduler.prefill_chunk_tokens": 2},
        {"scheduler.prefill_chunk_tokens": 7},
        {"scheduler.max_num_seqs": 2, "scheduler.max_num_tokens": 9},
        {"cache.block_size": 2},
        {"cache.block_size": 16},
        {"scheduler.async_depth": 0},
        {"scheduler.async_depth": 2},
        {"scheduler.async_depth": 2, "scheduler.prefill_chunk_tokens": 7} | ADVERSARIAL,
        {"checkpoint.path": None, "numerics": "normative"},
        {"speculation.mode": "fixed", "speculation.max_drafts": 3, "scheduler.async_depth": 0},
        {"speculation.mode": "fixed", "speculation.max_drafts": 5, "scheduler.async_depth": 1}
        | ADVERSARIAL,
    ],
    ids=lambda variant: ",".join(str(value) for value in variant.values()),
)
def test_hits_in_company(variant: dict[str, object], make_engine: MakeEngine, ask: Ask) -> None:
    """Three that begin alike and a stranger, twice: hits while others run, and on whole prompts."""
    prompts = [text(1, 90), [*text(1, 85), 9, 9], text(1, 101), text(2, 30)]
    asked = {f"r{i}": (prompt, params(6)) for i, prompt in enumerate(prompts)}
    same = {name: value for name, value in variant.items() if "." not in name or "path" in name}
    cold, engine = make_engine(**same), make_engine(**PREFIX | variant)
    expected = outputs(ask(cold, asked))
    assert outputs(ask(engine, asked)) == expected
    before = hit_tokens(engine)
    assert outputs(ask(engine, asked)) == expected
    assert hit_tokens(engine) - before >= 3 * 80 + 16


@pytest.mark.parametrize("runtime", ["inline", "adversarial"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preempted_sequences_find_their_own_blocks(
    runtime: str, depth: int, make_engine: MakeEngine, ask: Ask
) -> None:
    scarce: dict[str, object] = {
        "backend.options": {"runtime": runtime},
        "scheduler.async_depth": depth,
        "cache.num_blocks": 40,
    }
    engine, cold = make_engine(**PREFIX | scarce), make_engine()
    asked = {f"r{i}": (text(i, 40 + 9 * i), params(12)) for i in range(4)}
    assert outputs(ask(engine, asked)) == outputs(ask(cold, asked))
    assert engine.stats().num_preemptions > 0
    assert hit_tokens(engine) > 0
    assert engine.stats().num_evicted_blocks > 0


def test_running_requests_share_blocks(make_engine: MakeEngine, ask: Ask) -> None:
    engine = make_engine(**PREFIX, **ADVERSARIAL)
    engine.add_request("first", text(5, 80), params(20))
    for _ in range(3):
        engine.step()
    engine.add_request("second", text(5, 90), params(6))
    engine.step()
    first, second = engine._scheduler.running
    assert first.blocks[:20] == second.blocks[:20]
    assert not set(first.blocks[20:]) & set(second.blocks[20:])
    shared = ask(engine, {})
    alone = {
        name: answer(ask, make_engine(), prompt, max_tokens=count)[0]
        for name, prompt, count in (("first", text(5, 80), 20), ("second", text(5, 90), 6))
    }
    assert {name: result.outputs[0].token_ids for name, result in shared.items()} == alone


def test_an_answer_is_found_by_the_next_turn(make_engine: MakeEngine, ask: Ask) -> None:
    engine, cold = make_engine(**PREFIX), make_engine()
    prompt = text(6, 70)
    for _ in range(3):
        before = hit_tokens(engine)
        tokens, _ = answer(ask, engine, prompt, max_tokens=9)
        assert tokens == answer(ask, cold, prompt, max_tokens=9)[0]
        if len(prompt) > 70:
            # All but the last token of the answer before, in full blocks.
            assert hit_tokens(engine) - before == (len(prompt) - 4) // BLOCK * BLOCK
        prompt = [*prompt, *tokens, 7, 8, 9]


def test_prompt_logprobs_are_complete_and_equal_after_a_hit(
    make_engine: MakeEngine, ask: Ask
) -> None:
    """P31: 33 tokens in blocks of 16, twice; the second time from the start again."""
    engine = make_engine(**PREFIX | {"cache.block_size": 16})
    before = hit_tokens(engine)
    wanted = {"r": (text(7, 33), params(prompt_logprobs=2, logprobs=1))}
    first, second = (ask(engine, wanted)["r"] for _ in range(2))
    assert first.prompt_logprobs is not None
    assert [entry is None for entry in first.prompt_logprobs] == [True] + [False] * 32
    assert (second.prompt_logprobs, second.outputs) == (first.prompt_logprobs, first.outputs)
    assert (second.num_cached_tokens, hit_tokens(engine) - before) == (0, 0)
    # What it left is found by a request that wants less.
    answer(ask, engine, text(7, 40))
    assert hit_tokens(engine) - before == 32


def test_blocks_of_a_failed_answer_are_forgotten(make_engine: MakeEngine, ask: Ask) -> None:
    engine = make_engine(**PREFIX)
    prompt = text(8, 40)
    expected, _ = answer(ask, engine, prompt, max_tokens=6)
    known = len(engine._scheduler.reuse.cache.index)  # type: ignore[union-attr]
    backbone = engine._runner._model  # type: ignore[attr-defined]
    norm, backbone._norm = backbone._norm, backbone._norm * float("nan")
    failed = ask(engine, {"r": (prompt, params(6))})["r"].outputs[0]
    backbone._norm = norm
    assert failed.error is not None
    assert len(engine._scheduler.reuse.cache.index) == known - 10  # type: ignore[union-attr]
    before = hit_tokens(engine)
    assert answer(ask, engine, prompt, max_tokens=6) == (expected, 0)
    assert hit_tokens(engine) == before


def test_one_that_outgrows_the_cache_fails_alone_beside_known_blocks(
    make_engine: MakeEngine, ask: Ask
) -> None:
    """P36: blocks that nobody holds are no obstacle, and blocks that are shared are no help."""
    engine = make_engine(**PREFIX | {"cache.num_blocks": 12})
    for family in (1, 2):
        answer(ask, engine, text(family, 16))
    (large,) = ask(engine, {"r": (text(1, 20), params(60))})["r"].outputs
    assert large.error is not None
    assert "KV capacity" in large.error
    assert len(large.token_ids) == 12 * BLOCK - 20 + 1
    assert answer(ask, engine, text(2, 17))[0] == answer(ask, make_engine(), text(2, 17))[0]
