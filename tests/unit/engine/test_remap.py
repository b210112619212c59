"""The remap from steps in flight to a new step."""

from __future__ import annotations

from typing import cast

from deepinfer.device.ops.state import NEWCOMER
from deepinfer.device.runtime import StepKind
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.remap import Remap, ResultRing
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata

PARAMS = SamplingParams()
RING = ResultRing(num_steps=3, rows_per_step=4)


def sequences(count: int) -> list[Sequence]:
    request = Request("r", None, [1], PARAMS, RequestControls.of(PARAMS, 9), 0, 0, 0, None)
    return [
        Sequence(request, index, [1], cast(OutputText, None), max_len=99) for index in range(count)
    ]


def step(number: int, *members: Sequence, samples: bool = True) -> SchedulerOutputs:
    rows = [
        SequenceMetadata(member, member.generation, 0, 1, 1, samples, False) for member in members
    ]
    return SchedulerOutputs(number, StepKind.DECODE, tuple(rows))


def test_without_steps_in_flight_everybody_is_a_newcomer() -> None:
    a, b = sequences(2)
    assert Remap.between((), step(0, a, b), RING).rows == (NEWCOMER, NEWCOMER)


def test_rows_follow_their_sequences_when_they_move() -> None:
    a, b, c, d = sequences(4)
    # b has left, d has joined, a and c have changed places.
    assert Remap.between([step(4, a, b, c)], step(5, c, d, a), RING).rows == (6, NEWCOMER, 4)


def test_the_latest_of_several_steps_counts() -> None:
    a, b = sequences(2)
    inflight = [step(2, a, b), step(3, b)]
    assert Remap.between(inflight, step(4, a, b), RING).rows == (8, 0)


def test_a_chunk_without_a_sample_leaves_no_result() -> None:
    a, b = sequences(2)
    chunk = SequenceMetadata(a, 0, 0, 0, 5, False, False)
    last = SequenceMetadata(b, 0, 0, 0, 5, True, False)
    prefill = SchedulerOutputs(1, StepKind.PREFILL, (chunk, last))
    assert Remap.between([prefill], step(2, a, b), RING).rows == (NEWCOMER, 4)


def test_a_result_from_before_a_preemption_is_none() -> None:
    (a,) = sequences(1)
    before = step(0, a)
    a.generation += 1
    assert Remap.between([before], step(1, a), RING).rows == (NEWCOMER,)


def test_steps_in_flight_have_rows_of_their_own() -> None:
    rows = {RING.first_row(number) for number in range(3)}
    assert rows == {0, 4, 8}
    assert RING.first_row(3) == RING.first_row(0)
    assert RING.num_rows == 12
