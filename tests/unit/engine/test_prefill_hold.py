"""Newcomers wait for company where a batch is full, never long, and nothing they say changes."""

from __future__ import annotations

from collections import Counter

import pytest

from deepinfer.device.runtime import StepKind
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.prefill_hold import PrefillHold
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.step_state import SchedulerOutputs
from tests.unit.engine.conftest import null_engine

CROWD = 32


def test_a_hold_ends_when_a_share_has_left_or_after_its_steps() -> None:
    hold, head = PrefillHold(10), object()
    assert not hold.is_on(0, CROWD, head)
    hold.begin(5, CROWD, head)
    assert hold.is_on(5, CROWD, head)
    assert hold.is_on(14, CROWD - 3, head)
    assert not hold.is_on(15, CROWD - 3, head)
    assert not hold.is_on(5, CROWD, head), "over is over"
    hold.begin(20, CROWD, head)
    assert not hold.is_on(21, CROWD - 4, head)


def test_small_crowds_and_no_wait_hold_nobody() -> None:
    for hold, crowd in ((PrefillHold(10), 15), (PrefillHold(0), CROWD)):
        hold.begin(0, crowd, hold)
        assert not hold.is_on(0, crowd, hold)


def test_somebody_else_at_the_head_of_the_line_is_tried() -> None:
    hold, large, urgent = PrefillHold(10), object(), object()
    hold.begin(0, CROWD, large)
    assert hold.is_on(1, CROWD, large)
    assert not hold.is_on(2, CROWD, urgent)


@pytest.mark.parametrize("depth", [1, 2])
def test_room_that_is_not_given_back_yet_begins_no_hold(depth: int) -> None:
    null = null_engine(
        overrides={
            "scheduler.max_num_seqs": 64, "scheduler.async_depth": depth, "cache.num_blocks": 2000,
        }
    )  # fmt: skip
    engine = null.engine
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for number in range(64 + 40):
        engine.add_request(f"r{number}", [60] * 4, params)
    for _ in range(8):
        engine.step()
    assert engine.stats().num_waiting == 40
    for number in range(44):
        engine.abort(f"r{number}")
    # Twenty still run; the slots of the others are free when what is in flight is collected.
    for _ in range(depth + 2):
        engine.step()
    assert engine.stats().num_waiting == 0
    null.run()


def answers(
    monkeypatch: pytest.MonkeyPatch, wait_steps: int, depth: int, **more: object
) -> tuple[dict[str, RequestOutput], Counter[StepKind]]:
    """160 requests of unequal length through 32 places, and the steps by kind."""
    options: dict[str, object] = {
        "scheduler.async_depth": depth,
        "scheduler.max_num_seqs": CROWD,
        "scheduler.prefill_wait_steps": wait_steps,
        "cache.num_blocks": 1000,
    }
    null = null_engine(overrides=options | more)
    kinds: Counter[StepKind] = Counter()
    schedule = null.engine._scheduler.schedule

    def counted() -> tuple[SchedulerOutputs, list[Sequence]]:
        step, starved = schedule()
        kinds[step.kind] += 1
        return step, starved

    monkeypatch.setattr(null.engine._scheduler, "schedule", counted)
    for number in range(160):
        params = SamplingParams(
            temperature=0.0, max_tokens=20 + number * 7 % 41, ignore_eos=True, seed=number
        )
        null.engine.add_request(f"r{number}", [50 + number % 40] * 5, params)
    return null.run(), kinds


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_full_batch_is_interrupted_less_often_and_says_the_same(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, often = answers(monkeypatch, 0, depth)
    together, seldom = answers(monkeypatch, 16, depth)
    assert len(together) == 160
    for name, output in at_once.items():
        assert together[name].outputs[0].token_ids == output.outputs[0].token_ids
    assert seldom[StepKind.PREFILL] * 2 < often[StepKind.PREFILL]
    # What waits leaves places empty: some more decode steps, not many.
    assert seldom[StepKind.DECODE] < 1.2 * often[StepKind.DECODE]


def test_where_memory_is_short_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, often = answers(monkeypatch, 0, 1, **{"cache.num_blocks": 200})
    together, seldom = answers(monkeypatch, 16, 1, **{"cache.num_blocks": 200})
    for name, output in at_once.items():
        assert together[name].outputs[0].token_ids == output.outputs[0].token_ids
    assert seldom[StepKind.PREFILL] < often[StepKind.PREFILL]


def test_a_place_is_never_kept_free_for_longer_than_asked() -> None:
    null = null_engine(
        overrides={
            "scheduler.max_num_seqs": CROWD, "scheduler.prefill_wait_steps": 6,
            "scheduler.async_depth": 0, "cache.num_blocks": 1000,
        }
    )  # fmt: skip
    engine = null.engine
    for number in range(CROWD):
        length = 10 if number == 0 else 100
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        engine.add_request(f"r{number}", [60] * 4, params)
    late = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add_request("late", [61] * 4, late)
    steps_free = 0
    while engine.stats().num_waiting:
        steps_free += engine._scheduler.slots.num_free > 0
        engine.step()
    assert 0 < steps_free <= 6 + 1
    null.run()
