"""Reading the traces that `--timeline` writes, also those of runs that were cut short."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.device.errors import ConfigError
from deepinfer.engine.trace_file import DEVICE_TRACK, HOST_TRACK, IDLE_TRACK

# Begins and durations are written to a nanosecond, so an end may be off by two.
_RESOLUTION_US = 0.002


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span of a track, in microseconds from the beginning of the trace."""

    track: int
    name: str
    step: int | None
    begin_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that are drawn, and the time they take on the device."""

    first_step: int
    last_step: int
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Trace:
    """All spans of a run."""

    spans: tuple[TraceSpan, ...]

    def on(self, track: int) -> list[TraceSpan]:
        """Spans of one track in order of time."""
        return sorted((s for s in self.spans if s.track == track), key=lambda span: span.begin_us)

    def total_us(self, track: int) -> float:
        """Sum over a track."""
        return sum(span.duration_us for span in self.spans if span.track == track)

    @property
    def idle_share(self) -> float:
        """idle / (busy + idle) of the device."""
        idle_us = self.total_us(IDLE_TRACK)
        span_us = self.total_us(DEVICE_TRACK) + idle_us
        return idle_us / span_us if span_us else 0.0

    def host_us(self) -> dict[str, float]:
        """The host's own time by phase: time of phases inside a phase is theirs."""
        own: dict[str, float] = {}
        open_spans: list[TraceSpan] = []
        for span in sorted(self.on(HOST_TRACK), key=lambda s: (s.begin_us, -s.end_us)):
            while open_spans and open_spans[-1].end_us <= span.begin_us + _RESOLUTION_US:
                open_spans.pop()
            own[span.name] = own.get(span.name, 0.0) + span.duration_us
            if open_spans:
                own[open_spans[-1].name] -= span.duration_us
            open_spans.append(span)
        return own

    def num_steps(self) -> int:
        """Steps that the device ran."""
        return len({span.step for span in self.spans if span.track == DEVICE_TRACK})

    def summary(self) -> str:
        """The run in a line."""
        span_us = self.total_us(DEVICE_TRACK) + self.total_us(IDLE_TRACK)
        return (
            f"{self.num_steps()} steps in {span_us / 1e6:.3f} s of the device, "
            f"idle {100 * self.idle_share:.2f} %"
        )

    def window(self, first_step: int | None, count: int) -> Window:
        """The span of device time of `count` steps; by default from the middle of the run.

        Raises:
            ConfigError: the trace has no such step.
        """
        by_step: dict[int, list[TraceSpan]] = {}
        for span in self.on(DEVICE_TRACK):
            if span.step is not None:
                by_step.setdefault(span.step, []).append(span)
        steps = sorted(by_step)
        if first_step is None:
            first_step = steps[max(0, (len(steps) - count) // 2)]
        if first_step not in by_step:
            raise ConfigError(
                f"--first-step {first_step}: the trace has steps {steps[0]} to {steps[-1]}"
            )
        chosen = [step for step in steps if step >= first_step][:count]
        begin_us = by_step[chosen[0]][0].begin_us
        end_us = by_step[chosen[-1]][-1].end_us
        return Window(chosen[0], chosen[-1], begin_us, end_us)


def read_trace(path: Path) -> Trace:
    """The spans of a trace file.

    Raises:
        ConfigError: the file cannot be read, is no such trace, or shows no device work.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a trace ({error})") from error
    if not lines or not lines[0].startswith("["):
        raise ConfigError(f"{path}: is no trace of --timeline; expected a JSON array of events")
    spans: list[TraceSpan] = []
    for number, line in enumerate(lines[1:], start=2):
        text = line.strip().rstrip(",")
        if text in ("", "]"):
            continue
        try:
            event = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break  # the line that a run was writing when it was cut short
            raise ConfigError(f"{path}:{number}: is no event of a trace ({error})") from error
        if event.get("ph") == "X":
            spans.append(_span(event))
    if not any(span.track == DEVICE_TRACK for span in spans):
        raise ConfigError(f"{path}: shows no work of the device; was the run cut short at once?")
    return Trace(tuple(spans))


def _span(event: dict[str, Any]) -> TraceSpan:
    begin_us = float(event["ts"])
    step = event.get("args", {}).get("step")
    return TraceSpan(event["tid"], event["name"], step, begin_us, begin_us + float(event["dur"]))
