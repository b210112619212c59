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
    assert found.never is not None
    assert found.never.tolist() == [9]
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


def test_a_step_with_the_requests_of_the_one_before_is_built_once() -> None:
    rows = [(sequence(11, min_tokens=4, logit_bias={3: 1.0}), 0)]
    builder = SamplingBuilder(VOCAB, RULES)
    first, second = (builder.build(step(position, *rows)) for position in (3, 4))
    assert first is second


class Counting:
    """Allows 5, then 6, then 7, ..."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self, row: int) -> torch.Tensor:
        return torch.arange(VOCAB) == 5 + len(self.taken) + row

    def advance(self, token_id: int) -> None:
        assert bool(self.mask(0)[token_id])
        self.taken.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]


@pytest.mark.parametrize(
    ("drafts", "allowed"),
    [
        ([], [5]),
        ([5, 6, 7], [5, 6, 7, 8]),
        ([5, 9, 7], [5, 6]),
        ([9, 6, 7], [5]),
        ([5, -1, 7], [5, 6]),
    ],
)
def test_a_constraint_follows_the_drafts_as_far_as_they_are_allowed(
    drafts: list[int], allowed: list[int]
) -> None:
    bound, constraint = sequence(11), Counting()
    bound.constraint, bound.draft_ids = constraint, drafts
    metadata = SequenceMetadata(bound, 0, 0, 3, 4, True, False)
    batch = SamplingBuilder(VOCAB, RULES).build(SchedulerOutputs(7, StepKind.DECODE, (metadata,)))
    assert batch.allowed is not None
    masks = batch.allowed.masks[batch.allowed.rows[0]]
    assert [mask.nonzero().flatten().tolist() for mask in masks] == [[token] for token in allowed]
    assert constraint.taken == []
