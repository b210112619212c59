"""The engine repeats the golden greedy tokens, however the work is cut into steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams

GOLDEN = Path(__file__).parents[2] / "data/golden"


@pytest.mark.parametrize("fixture", ["tiny_a", "tiny_b"])
@pytest.mark.parametrize(
    ("chunk", "runtime"),
    [(1, "inline"), (7, "thread"), (64, "inline"), (64, "thread"), (7, "adversarial")],
)
def test_greedy_tokens_equal_the_golden_ones(
    fixture: str,
    chunk: int,
    runtime: str,
    make_engine: Callable[..., LLMEngine],
    ask: Callable[..., dict[str, RequestOutput]],
) -> None:
    cases = json.loads((GOLDEN / fixture / "cases.json").read_text(encoding="utf-8"))["cases"]
    engine = make_engine(
        **{
            "checkpoint.path": str(GOLDEN / fixture / "checkpoint"),
            "backend.options": {"runtime": runtime},
            "scheduler.prefill_chunk_tokens": chunk,
        }
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    results = ask(engine, {case["name"]: (case["prompt_ids"], params) for case in cases})
    for case in cases:
        (answer,) = results[case["name"]].outputs
        assert answer.token_ids == case["greedy_ids"], case["name"]
        assert answer.finish_reason is FinishReason.LENGTH
