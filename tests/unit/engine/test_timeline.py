"""Idle time of the device and phases of the host, on virtual time where they are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.device.null import CounterScript, StepCosts
from deepinfer.device.runtime import StepKind
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.timeline import (
    DeviceSpan,
    HostSpan,
    Phase,
    RecordedTimeline,
    ScriptedHost,
    TimelineTotals,
)
from tests.unit.engine.conftest import null_engine

DEVICE_STEP_US = 1000.0
# How a step's host work falls on its phases, in parts of ten.
PARTS = {
    Phase.SCHEDULE: 2,
    Phase.BUILD: 2,
    Phase.LAUNCH: 1,
    Phase.CONTROLS: 1,
    Phase.COMMIT: 2,
    Phase.OUTPUT: 2,
}
NUM_TOKENS = 150


class Spans:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.host_spans: list[HostSpan] = []
        self.device_spans: list[DeviceSpan] = []
        self.gaps: list[tuple[float, float]] = []
        self.marks: list[str] = []

    def host(self, span: HostSpan) -> None:
        self.host_spans.append(span)

    def device(self, span: DeviceSpan) -> None:
        self.device_spans.append(span)

    def idle(self, begin_us: float, end_us: float) -> None:
        self.gaps.append((begin_us, end_us))

    def mark(self, text: str, time_us: float) -> None:
        self.marks.append(text)

    def close(self) -> None:
        pass


def run(
    host_share: float, depth: int, spans: Spans | None = None, drafts: int = 0
) -> TimelineTotals:
    """Decode with host work of a share of the device step; the timeline's sums."""
    costs_us = {phase: host_share * DEVICE_STEP_US * part / 10 for phase, part in PARTS.items()}
    made: list[ScriptedHost] = []

    def timeline(now_us: Callable[[], float], advance: Callable[[float], None]) -> ScriptedHost:
        made.append(ScriptedHost(now_us, advance, costs_us, spans))
        return made[0]

    null = null_engine(
        CounterScript(20, 300, num_accepted=drafts),
        {"scheduler.async_depth": depth, "cache.num_blocks": 2000, "max_model_len": 1000},
        max_drafts=drafts,
        costs=StepCosts(dict.fromkeys(StepKind, DEVICE_STEP_US), row_us=0.0),
        timeline=timeline,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS * (1 + drafts), ignore_eos=True)
    for index in range(8):
        null.engine.add_request(f"r{index}", [5] * 4, params)
    null.run()
    accounting = null.runtime.accounting()
    assert made[0].totals.device_busy_us == pytest.approx(accounting.device_busy_us)
    assert made[0].totals.device_idle_us == pytest.approx(accounting.device_idle_us)
    assert made[0].totals.phase_us[Phase.WAIT] == pytest.approx(accounting.host_wait_us)
    null.engine.close()
    return made[0].totals


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("host_share", [0.1, 0.5, 0.8])
def test_the_device_does_not_wait_for_a_host_that_is_faster(
    host_share: float, drafts: int, depth: int
) -> None:
    assert run(host_share, depth, drafts=drafts).idle_share < 0.02


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host_share", [1.25, 2.0])
def test_waiting_is_shown_when_the_host_is_slower(host_share: float, depth: int) -> None:
    """ZO-10: the device then runs at the host's pace."""
    assert run(host_share, depth).idle_share == pytest.approx(1 - 1 / host_share, abs=0.02)


@pytest.mark.parametrize("host_share", [0.1, 0.8])
def test_the_plain_loop_waits_for_the_host(host_share: float) -> None:
    # But for launch and controls, which end after the forward was issued: two parts of ten.
    waited_for = 0.8 * host_share
    expected = waited_for / (1 + waited_for)
    assert run(host_share, depth=0).idle_share == pytest.approx(expected, abs=0.02)


def test_spans_and_gaps_fit_the_sums() -> None:
    spans = Spans()
    totals = run(1.5, 1, spans)
    assert sum(end - begin for begin, end in spans.gaps) == pytest.approx(totals.device_idle_us)
    assert len(spans.gaps) == totals.num_gaps
    busy_us = sum(span.end_us - span.begin_us for span in spans.device_spans)
    assert busy_us == pytest.approx(totals.device_busy_us)
    assert totals.num_steps == len(spans.device_spans) == NUM_TOKENS
    assert {span.phase for span in spans.host_spans} == set(Phase)
    for phase, part in PARTS.items():
        assert totals.phase_us[phase] == pytest.approx(150 * part * NUM_TOKENS, rel=0.05)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time_us = 0.0

    def __call__(self) -> float:
        return self.time_us


def test_a_phase_inside_another_keeps_its_own_time() -> None:
    clock = Clock()
    timeline = RecordedTimeline(clock)
    with timeline.phase(Phase.LAUNCH):
        clock.time_us += 10
        with timeline.phase(Phase.WAIT):
            clock.time_us += 100
        clock.time_us += 5
    assert timeline.totals.phase_us[Phase.LAUNCH] == 15
    assert timeline.totals.phase_us[Phase.WAIT] == 100
    assert timeline.totals.host_work_us == 15


def test_events_of_the_host_are_marked() -> None:
    spans = Spans()
    null = null_engine(
        CounterScript(20, 300),
        {"cache.num_blocks": 6, "scheduler.async_depth": 1},
        timeline=lambda now_us, advance: RecordedTimeline(now_us, spans),
    )
    for name in ("a", "b"):
        params = SamplingParams(max_tokens=16, temperature=0.0, stop_token_ids=[30])
        null.engine.add_request(name, [5] * 4, params)
    null.run()
    assert {"a[0] ended: stop", "b[0] ended: stop", "preempted 1", "flush"} <= set(spans.marks)
    null.engine.close()


def test_time_without_requests_is_not_idle_time() -> None:
    spans = Spans()
    null = null_engine(timeline=lambda now_us, advance: RecordedTimeline(now_us, spans))
    for name in ("first", "second"):
        null.engine.add_request(name, [5], SamplingParams(max_tokens=5, temperature=0.0))
        null.run()
        null.runtime.clock.advance(1e6)
    assert spans.gaps == []
    null.engine.close()
