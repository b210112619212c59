"""Controls of a step like the one before equal those built from nothing."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from deepinfer.device.runtime import StepKind
from deepinfer.engine.commit import StopRules
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_batch import SamplingBatch
from deepinfer.engine.sampling_builder import SamplingBuilder
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata

VOCAB = 10
RULES = StopRules(frozenset({1}), never_token_ids=(9,))


def sequence(seed: int, **fields: Any) -> Sequence:  # noqa: ANN401 - any field of a request
    params = SamplingParams(**fields)
    controls = RequestControls.of(params, VOCAB)
    request = Request("r", None, [1, 2], params, controls, seed, 0, 0, None)
    return Sequence(request, 0, [1, 2], cast(OutputText, None), max_len=99)


def step(position: int, *rows: tuple[Sequence, int]) -> SchedulerOutputs:
    return SchedulerOutputs(
        position,
        StepKind.DECODE,
        tuple(SequenceMetadata(each, 0, slot, position, 1, True, False) for each, slot in rows),
    )


def check_equal(found: SamplingBatch, expected: SamplingBatch) -> None:
    assert torch.equal(found.integers, expected.integers)
    assert torch.equal(found.reals, expected.reals)
    assert (found.work, found.num_top) == (expected.work, expected.num_top)
    for name in ("allowed", "banned", "bias"):
        left, right = getattr(found, name), getattr(expected, name)
        assert (left is None) == (right is None)
        if left is not None:
            assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True)), name


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "logprobs": 3},
        {"top_k": 3, "presence_penalty": 1.0},
        {"min_tokens": 4, "stop_token_ids": [5]},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3, 4]},
    ],
)
def test_every_step_is_built_as_if_it_were_the_first(fields: dict[str, Any]) -> None:
    plain, special, late = sequence(11), sequence(12, **fields), sequence(13)
    builder = SamplingBuilder(VOCAB, RULES)
    lives = [
        [(plain, 0), (special, 1)],
        [(plain, 0), (special, 1)],
        [(plain, 0), (special, 1)],
        [(special, 1), (plain, 0)],
        [(special, 1), (late, 2)],
        # Preempted and back: another slot, and with it other penalty counts.
        [(special, 0), (late, 2)],
        [(special, 0), (late, 2)],
    ]
    for position, rows in enumerate(lives, start=3):
        scheduled = step(position, *rows)
        check_equal(builder.build(scheduled), SamplingBuilder(VOCAB, RULES).build(scheduled))


def test_a_step_in_flight_keeps_its_positions() -> None:
    rows = [(sequence(11), 0)]
    builder = SamplingBuilder(VOCAB, RULES)
    first, second, third = (builder.build(step(position, *rows)) for position in (3, 4, 5))
    assert [batch.integers[3].tolist() for batch in (first, second, third)] == [[4], [5], [6]]
