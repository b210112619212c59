"""Prefix hits in mode bounded: one answer whatever the steps, and what becomes of later blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.request_result import APPROXIMATE_PREFIX_MARK
from deepinfer.engine.sampling_params import SamplingParams

MakeEngine = Callable[..., LLMEngine]
Ask = Callable[..., dict[str, RequestOutput]]
BLOCK, WINDOW = 4, 8  # of tiny_a
PREFIX: dict[str, object] = {"cache.block_size": BLOCK, "cache.prefix": True}
BOUNDED: dict[str, object] = {"replay.mode": "bounded", "replay.keep_tokens": 12}
VARIANTS: list[dict[str, object]] = [
    {"scheduler.prefill_chunk_tokens": 1},
    {"scheduler.prefill_chunk_tokens": 7},
    {"scheduler.async_depth": 2, "backend.options": {"runtime": "adversarial"}},
]
Answer = list[tuple[int, float]]


def text(length: int) -> list[int]:
    return [(11 * j + j * j) % 311 + 5 for j in range(length)]


def ask_one(ask: Ask, engine: LLMEngine, prompt: list[int]) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
    return ask(engine, {"r": (prompt, params)})["r"]


def answer(ask: Ask, engine: LLMEngine, prompt: list[int]) -> Answer:
    """Tokens and their log probabilities, which show every bit of what they came from."""
    entries = ask_one(ask, engine, prompt).outputs[0].logprobs or ()
    return [(entry.token_id, entry.logprob) for entry in entries]


@pytest.mark.parametrize("mode", [BOUNDED, {}])
def test_a_rebuilt_answer_does_not_depend_on_the_steps(
    mode: dict[str, object], make_engine: MakeEngine, ask: Ask
) -> None:
    cheap = PREFIX | mode | {"replay.rebuild": "bounded"}
    engines = [make_engine(**cheap | variant) for variant in ({}, *VARIANTS)]
    found = []
    for engine in engines:
        ask_one(ask, engine, text(40))
        before = engine.stats()
        found.append(answer(ask, engine, text(61)))
        assert engine.stats().prefix_hit_tokens - before.prefix_hit_tokens == 40 - WINDOW
        assert engine.stats().replayed_tokens - before.replayed_tokens == WINDOW
    assert all(other == found[0] for other in found[1:])


def test_an_exact_rebuild_in_mode_bounded_changes_nothing(
    make_engine: MakeEngine, ask: Ask
) -> None:
    engine = make_engine(**PREFIX | BOUNDED)
    ask_one(ask, engine, text(90))
    for length in (91, 103, 120):
        assert answer(ask, engine, text(length)) == answer(
            ask, make_engine(**BOUNDED), text(length)
        )
    assert engine.stats().prefix_hit_tokens > 0


def test_saved_windows_change_nothing_in_mode_bounded(make_engine: MakeEngine, ask: Ask) -> None:
    """They are those before the decoder's start, where a prompt begins at the latest."""
    engine = make_engine(**PREFIX | BOUNDED | {"cache.host_memory": "64MiB"})
    # After 48 and 52 windows end where the later layers begin, whose windows are somebody else's.
    lengths = (50, 53, 62, 90, 91, 48, 52)
    for length in lengths:
        assert answer(ask, engine, text(length)) == answer(
            ask, make_engine(**BOUNDED), text(length)
        )
    stats = engine.stats()
    # 50 begins at 0 and saves its windows at 36, 53 begins there and saves at 40, and so on.
    assert stats.num_loaded_windows == 6
    assert stats.prefix_hit_tokens == 36 + 40 + 48 + 76 + 36 + 40


def test_windows_of_a_bounded_prompt_are_no_use_to_one_that_is_all_kept(
    make_engine: MakeEngine, ask: Ask
) -> None:
    """Its layers after the last source begin at 0 and need windows that were never computed."""
    bounded = BOUNDED | {"replay.keep_tokens": 20}
    engine = make_engine(**PREFIX | bounded | {"cache.host_memory": "64MiB"})
    ask_one(ask, engine, text(36))  # saves its windows at 16
    assert answer(ask, engine, text(20)) == answer(ask, make_engine(**bounded), text(20))
    assert engine.stats().num_loaded_windows == 0
    assert answer(ask, engine, text(37)) == answer(ask, make_engine(**bounded), text(37))
    assert engine.stats().num_loaded_windows == 1


@pytest.mark.parametrize(
    ("after_hit", "num_known", "is_marked"),
    [("publish", 60, False), ("mark", 60, True), ("withhold", 40, False)],
)
def test_blocks_after_a_bounded_rebuild(
    after_hit: str, num_known: int, is_marked: bool, make_engine: MakeEngine, ask: Ask
) -> None:
    rebuild = {"replay.rebuild": "bounded", "replay.publish_after_hit": after_hit}
    engine = make_engine(**PREFIX | rebuild)
    outputs = [ask_one(ask, engine, text(length)) for length in (42, 62, 70)]
    assert [output.num_cached_tokens for output in outputs] == [
        0,
        40 - WINDOW,
        num_known - WINDOW,
    ]
    marks = [APPROXIMATE_PREFIX_MARK in output.marks for output in outputs]
    assert marks == [False, False, is_marked]
    expected = num_known - WINDOW if is_marked else 0
    assert engine.stats().approximate_hit_tokens == expected


def test_withheld_blocks_leave_every_cached_block_as_in_a_cold_run(
    make_engine: MakeEngine, ask: Ask
) -> None:
    """A third prompt gives, bit by bit, what it gives without the second."""
    rebuild = {"replay.rebuild": "bounded", "replay.publish_after_hit": "withhold"}
    with_it, without = (
        make_engine(**PREFIX | rebuild | {"scheduler.max_num_seqs": seqs}) for seqs in (3, 4)
    )
    ask_one(ask, with_it, text(42))
    ask_one(ask, with_it, text(62))
    ask_one(ask, without, text(42))
    assert answer(ask, with_it, text(70)) == answer(ask, without, text(70))


@pytest.mark.parametrize("after_hit", ["publish", "mark"])
def test_an_exact_prompt_goes_on_with_its_own_blocks(
    after_hit: str, make_engine: MakeEngine, ask: Ask
) -> None:
    """Approximate blocks of its text are known; its own take their place, on the host, too."""
    rebuild = {"replay.rebuild": "bounded", "replay.publish_after_hit": after_hit}
    memory: dict[str, object] = {"cache.num_blocks": 56, "cache.host_memory": "64MiB"}
    chunks = {"scheduler.prefill_chunk_tokens": 16}
    engine = make_engine(**PREFIX | rebuild | memory | chunks)
    cold = make_engine()
    prompt = [*text(42), *text(48)[::-1]]
    ask_one(ask, engine, text(62))
    ask_one(ask, engine, prompt[:62])  # a hit of 40 tokens: what it writes up to 60 is approximate
    scored = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=0)
    found, expected = (
        ask(asked, {"r": (prompt, scored)})["r"].prompt_logprobs for asked in (engine, cold)
    )
    assert found == expected
    reuse = engine._scheduler.reuse
    assert reuse is not None
    names = list[bytes]()
    reuse.cache.name_blocks(names, prompt)
    known = reuse.cache.index.find(names)
    assert len(known) == 90 // BLOCK
    assert all(map(reuse.cache.index.is_exact, known))
    ask_one(ask, engine, [7 + token % 200 for token in range(215)])  # needs nearly all blocks
    before = engine.stats().num_loaded_blocks
    longer = [*prompt, 9, 9, 9]
    assert answer(ask, engine, longer) == answer(ask, cold, longer)
    assert engine.stats().num_loaded_blocks > before


def test_a_rebuilt_answer_does_not_depend_on_who_writes_the_same_text(
    make_engine: MakeEngine, ask: Ask
) -> None:
    """Beside it a cold prompt makes exact blocks of its text known, just before its own."""
    common: dict[str, object] = {
        "replay.rebuild": "bounded",
        "scheduler.async_depth": 0,
        "scheduler.prefill_chunk_tokens": 16,
    }
    engine, alone = (
        make_engine(**PREFIX | common | {"scheduler.max_num_seqs": seqs}) for seqs in (5, 6)
    )
    ask_one(ask, alone, text(48))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
    engine.add_request("cold", text(90), params)
    for _ in range(3):
        engine.step()
    found = answer(ask, engine, text(90))
    assert engine.stats().prefix_hit_tokens == 48 - WINDOW
    assert found == answer(ask, alone, text(90))
    assert alone.stats().prefix_hit_tokens == 48 - WINDOW
