"""Where the time of host and device goes, step by step.

The host's work falls into phases, which may nest; a phase's own time is that of its body without
the phases inside. The device's work is read from timed events when a step is collected. Gaps
between two pieces of device work are idle time: what the asynchronous scheduler is there to
remove. Gaps while no request was open are nobody's fault and are not counted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from deepinfer.engine.step_state import SchedulerOutputs, WorkerStepState


class Phase(enum.StrEnum):
    """What the host does."""

    SCHEDULE = "schedule"
    BUILD = "build"
    LAUNCH = "launch"
    WAIT = "wait"
    COMMIT = "commit"
    CONTROLS = "controls"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class HostSpan:
    """One phase, in microseconds of the runtime's clock.

    Attributes:
        phase: what was done.
        step: for which step, None where it concerns several.
        begin_us: its begin.
        end_us: its end.
    """

    phase: Phase
    step: int | None
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """One piece of a step on the device.

    Attributes:
        name: forward or sampling.
        scheduled: the step.
        begin_us: its begin.
        end_us: its end.
    """

    name: str
    scheduled: SchedulerOutputs
    begin_us: float
    end_us: float


class SpanSink(Protocol):
    """Takes spans as they become known."""

    def host(self, span: HostSpan) -> None: ...

    def device(self, span: DeviceSpan) -> None: ...

    def idle(self, begin_us: float, end_us: float) -> None: ...

    def mark(self, text: str, time_us: float) -> None: ...

    def close(self) -> None: ...


class Timeline:
    """What the engine tells about its steps; this one records nothing and costs nothing."""

    is_recording = False

    def phase(self, phase: Phase, step: int | None = None) -> AbstractContextManager[None]:
        """The block is that phase."""
        return nullcontext()

    def collected(self, state: WorkerStepState) -> None:
        """A step's device work has ended; its events have happened."""

    def mark(self, text: str) -> None:
        """Something happened on the host now."""

    def drained(self) -> None:
        """Nothing is left to do; what the device idles until the next step is not counted."""

    def close(self) -> None:
        """The run is over."""


@dataclass(slots=True)
class TimelineTotals:
    """Sums over all steps, in microseconds.

    Attributes:
        num_steps: steps collected.
        phase_us: the host's own time by phase.
        device_busy_us: time in which the device computed.
        device_idle_us: gaps between two pieces of device work.
        num_gaps: how many gaps.
    """

    num_steps: int = 0
    phase_us: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    device_busy_us: float = 0.0
    device_idle_us: float = 0.0
    num_gaps: int = 0

    @property
    def host_work_us(self) -> float:
        """The host's time without its waiting for the device."""
        return sum(self.phase_us.values()) - self.phase_us[Phase.WAIT]

    @property
    def idle_share(self) -> float:
        """idle / (busy + idle) of the device; 0 when nothing has run."""
        span_us = self.device_busy_us + self.device_idle_us
        return self.device_idle_us / span_us if span_us else 0.0


class RecordedTimeline(Timeline):
    """Adds up, and hands every span to a sink."""

    is_recording = True

    def __init__(self, now_us: Callable[[], float], sink: SpanSink | None = None) -> None:
        """An empty timeline.

        Args:
            now_us: the runtime's clock.
            sink: takes the spans; None keeps sums only.
        """
        self.totals = TimelineTotals()
        self._now_us, self._sink = now_us, sink
        # Time that phases inside the open ones took, innermost last.
        self._inner_us: list[float] = []
        self._device_end_us: float | None = None

    @contextmanager
    def phase(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        """The block is that phase; time of phases inside it is theirs."""
        begin_us = self._now_us()
        self._inner_us.append(0.0)
        try:
            yield
        finally:
            self._end_work(phase)
            end_us = self._now_us()
            inner_us = self._inner_us.pop()
            self.totals.phase_us[phase] += end_us - begin_us - inner_us
            if self._inner_us:
                self._inner_us[-1] += end_us - begin_us
            if self._sink is not None:
                self._sink.host(HostSpan(phase, step, begin_us, end_us))

    def write_to(self, sink: SpanSink) -> None:
        """Hand spans to this sink from now on."""
        self.close()
        self._sink = sink

    def _end_work(self, phase: Phase) -> None:
        """Called at the end of a phase; a host whose work is made up spends its time here."""

    def collected(self, state: WorkerStepState) -> None:
        """Read the times of a step's device work."""
        self.totals.num_steps += 1
        for name, begin, end in state.device_work:
            self._device(DeviceSpan(name, state.scheduled, begin.time_us, end.time_us))

    def mark(self, text: str) -> None:
        """Hand an event of now to the sink."""
        if self._sink is not None:
            self._sink.mark(text, self._now_us())

    def drained(self) -> None:
        """Count no gap before the next step."""
        self._device_end_us = None

    def close(self) -> None:
        """Close the sink."""
        if self._sink is not None:
            self._sink.close()

    def _device(self, span: DeviceSpan) -> None:
        last_us = self._device_end_us
        if last_us is not None and span.begin_us > last_us:
            self.totals.device_idle_us += span.begin_us - last_us
            self.totals.num_gaps += 1
            if self._sink is not None:
                self._sink.idle(last_us, span.begin_us)
        self.totals.device_busy_us += span.end_us - span.begin_us
        self._device_end_us = span.end_us
        if self._sink is not None:
            self._sink.device(span)


class ScriptedHost(RecordedTimeline):
    """A timeline on virtual time, where the host's work takes what it is said to take."""

    def __init__(
        self,
        now_us: Callable[[], float],
        advance: Callable[[float], None],
        costs_us: dict[Phase, float],
        sink: SpanSink | None = None,
    ) -> None:
        """An empty timeline.

        Args:
            now_us: the virtual clock.
            advance: lets virtual time pass.
            costs_us: own time of each phase in a step; phases left out take none.
            sink: takes the spans; None keeps sums only.
        """
        super().__init__(now_us, sink)
        self._advance, self._costs_us = advance, costs_us

    def _end_work(self, phase: Phase) -> None:
        self._advance(self._costs_us.get(phase, 0.0))
