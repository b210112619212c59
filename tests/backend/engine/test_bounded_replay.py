"""Bounded replay in the engine: golden tokens, and one setting that nothing else can flip."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deepinfer.config import EngineConfig, override
from deepinfer.device.errors import ConfigError
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams

GOLDEN = Path(__file__).parents[2] / "data/golden"
MakeEngine = Callable[..., LLMEngine]
Ask = Callable[..., dict[str, RequestOutput]]
# tiny_a's window is 8; six prompts of 1 to 46 tokens, two of them all kept.
BOUNDED: dict[str, object] = {"replay.mode": "bounded", "replay.keep_tokens": 12}
VARIANTS: dict[str, dict[str, object]] = {
    "chunk 1": {"scheduler.prefill_chunk_tokens": 1},
    "chunk 7": {"scheduler.prefill_chunk_tokens": 7},
    "few rows": {"scheduler.max_num_seqs": 4, "scheduler.max_num_tokens": 9},
    "blocks of 2": {"cache.block_size": 2},
    "depth 0": {"scheduler.async_depth": 0, "scheduler.prefill_chunk_tokens": 5},
    "depth 2, adversarial": {
        "scheduler.async_depth": 2,
        "scheduler.max_num_seqs": 3,
        "scheduler.prefill_chunk_tokens": 7,
        "backend.options": {"runtime": "adversarial"},
    },
}
# What an answer was computed from shows in its log probabilities, bit by bit.
Answer = list[tuple[int, float]]


def _answers(
    ask: Ask, engine: LLMEngine, prompts: Sequence[list[int]], order: Sequence[int] | None = None
) -> list[Answer]:
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
    indices = range(len(prompts)) if order is None else order
    results = ask(engine, {f"r{i}": (prompts[i], params) for i in indices})
    return [
        [(entry.token_id, entry.logprob) for entry in results[f"r{i}"].outputs[0].logprobs or ()]
        for i in range(len(prompts))
    ]


@pytest.fixture
def six(prompts: Sequence[list[int]]) -> list[list[int]]:
    return [list(prompt) for prompt in prompts[::3]]


@pytest.mark.parametrize("fixture", ["tiny_a", "tiny_b"])
@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize(
    ("chunk", "depth", "runtime", "drafts"),
    [(64, 1, "inline", 0), (7, 2, "adversarial", 3), (5, 0, "thread", 0)],
)
def test_greedy_tokens_equal_the_golden_ones(
    fixture: str,
    extra: int,
    chunk: int,
    depth: int,
    runtime: str,
    drafts: int,
    make_engine: MakeEngine,
    ask: Ask,
) -> None:
    cases = json.loads((GOLDEN / fixture / "cases.json").read_text(encoding="utf-8"))["cases"]
    keep = {"tiny_a": 8, "tiny_b": 16}[fixture] + extra
    engine = make_engine(
        **{
            "checkpoint.path": str(GOLDEN / fixture / "checkpoint"),
            "replay.mode": "bounded",
            "replay.keep_tokens": keep,
            "backend.options": {"runtime": runtime},
            "scheduler.async_depth": depth,
            "scheduler.prefill_chunk_tokens": chunk,
        }
        | ({"speculation.mode": "fixed", "speculation.max_drafts": drafts} if drafts else {})
    )
    expected = {
        case["name"]: replay["greedy_ids"]
        for case in cases
        for replay in case["replay"]
        if replay["keep"] == keep
    }
    # A prompt that is kept whole answers as in mode exact.
    expected |= {c["name"]: c["greedy_ids"][:8] for c in cases if len(c["prompt_ids"]) <= keep}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    results = ask(engine, {case["name"]: (case["prompt_ids"], params) for case in cases})
    assert len(expected) >= 5
    found = {name: results[name].outputs[0].token_ids for name in expected}
    assert found == expected


@pytest.mark.parametrize("numerics", ["exact", "normative"])
def test_no_way_of_running_changes_an_answer(
    numerics: str, make_engine: MakeEngine, ask: Ask, six: list[list[int]]
) -> None:
    base = BOUNDED | {"numerics": numerics}
    expected = _answers(ask, make_engine(**base), six)
    exact = _answers(ask, make_engine(numerics=numerics), six)
    for prompt, bounded, whole in zip(six, expected, exact, strict=True):
        assert (bounded == whole) == (len(prompt) <= 12), len(prompt)
    names = VARIANTS if numerics == "exact" else ("depth 2, adversarial",)
    for name in names:
        assert _answers(ask, make_engine(**base, **VARIANTS[name]), six) == expected, name
    shuffled = random.Random(0).sample(range(6), 6)
    assert _answers(ask, make_engine(**base), six, shuffled) == expected


@pytest.mark.parametrize(
    ("runtime", "depth", "prefix"),
    [
        ("inline", 0, False),
        ("inline", 1, False),
        ("adversarial", 2, False),
        ("inline", 1, True),
        ("adversarial", 2, True),
    ],
)
def test_preemption_changes_no_answer(
    runtime: str,
    depth: int,
    prefix: bool,
    make_engine: MakeEngine,
    ask: Ask,
    six: list[list[int]],
) -> None:
    """An answer computed anew runs its decoder from the same position, not from a later one.

    With the prefix cache it finds the blocks that it has left itself.
    """
    scarce = make_engine(
        **BOUNDED,
        **{
            "backend.options": {"runtime": runtime},
            "scheduler.async_depth": depth,
            "cache.block_size": 4,
            "cache.num_blocks": 18,
            "cache.prefix": prefix,
        },
    )
    before = scarce.stats().num_preemptions
    found = _answers(ask, scarce, six)
    assert scarce.stats().num_preemptions > before
    assert found == _answers(ask, make_engine(**BOUNDED), six)


@pytest.mark.parametrize(("chunk", "drafts"), [(64, 0), (7, 2)])
def test_hits_with_exact_rebuild_change_no_answer_of_bounded_prompts(
    chunk: int, drafts: int, make_engine: MakeEngine, ask: Ask, six: list[list[int]]
) -> None:
    """The encoder's windows are rebuilt exactly, the decoder starts where a cold prompt's does."""
    speculation = {"speculation.mode": "fixed", "speculation.max_drafts": drafts} if drafts else {}
    engine = make_engine(
        **BOUNDED,
        **speculation,
        **{
            "cache.prefix": True,
            "cache.block_size": 4,
            "scheduler.prefill_chunk_tokens": chunk,
        },
    )
    expected = _answers(ask, make_engine(**BOUNDED), six)
    assert _answers(ask, engine, six) == expected
    before = engine.stats().replayed_tokens
    longer = [[*prompt, answer[0][0]] for prompt, answer in zip(six, expected, strict=True)]
    assert _answers(ask, engine, six) == expected
    assert engine.stats().replayed_tokens > before
    assert _answers(ask, engine, longer) == _answers(ask, make_engine(**BOUNDED), longer)


def test_a_request_for_prompt_logprobs_keeps_every_row(
    make_engine: MakeEngine, ask: Ask, six: list[list[int]]
) -> None:
    """It answers as in mode exact, and its bounded company does not."""
    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    asked = {"all rows": (six[-1], params), "company": (six[-2], plain)}
    bounded, exact = ask(make_engine(**BOUNDED), asked), ask(make_engine(), asked)
    assert bounded["all rows"].prompt_logprobs == exact["all rows"].prompt_logprobs
    assert bounded["all rows"].outputs == exact["all rows"].outputs
    assert bounded["company"].outputs[0].logprobs != exact["company"].outputs[0].logprobs


def test_a_tail_shorter_than_the_window_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"replay\.keep_tokens = 7 .* window of 8 .* at least 8"):
        make_engine(**{"replay.mode": "bounded", "replay.keep_tokens": 7})
    make_engine(**{"replay.keep_tokens": 7})  # not used in mode exact


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"replay.mode": "bounded", "replay.keep_tokens": 8}, r"replay\.keep_tokens = 8"),
        ({"speculation.mode": "fixed", "speculation.max_drafts": 7}, r"max_drafts = 7"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_weights_are_read(
    changes: dict[str, object], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("deepinfer.engine.llm_engine.load_model", read)
    with pytest.raises(ConfigError, match=field):
        LLMEngine.from_config(override(EngineConfig(), changes))
