"""Traces are JSON whose events say which step they are of, from when they are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer.device.runtime import StepKind
from deepinfer.engine.step_state import SchedulerOutputs
from deepinfer.engine.timeline import DeviceSpan, HostSpan, Phase, RecordedTimeline
from deepinfer.engine.trace_file import DEVICE_TRACK, HOST_TRACK, IDLE_TRACK, TraceFile


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_spans_carry_their_step_place_and_times(tmp_path: Path) -> None:
    path = tmp_path / "a.trace.json"
    with TraceFile(path) as trace:
        trace.host(HostSpan(Phase.BUILD, 7, 100.0, 104.5))
        trace.host(HostSpan(Phase.OUTPUT, None, 105.0, 106.0))
        trace.device(DeviceSpan("forward", SchedulerOutputs(7, StepKind.DECODE, ()), 110.0, 150.25))
        trace.idle(150.25, 151.25)
    build, output, forward, idle = spans(path)
    assert (build["name"], build["tid"], build["ts"], build["dur"]) == ("build", HOST_TRACK, 0, 4.5)
    assert (build["args"], output["args"]) == ({"step": 7}, {})
    assert (forward["name"], forward["tid"], forward["dur"]) == (
        "decode forward", DEVICE_TRACK, 40.25,
    )  # fmt: skip
    assert forward["args"] == {"step": 7, "num_seqs": 0, "num_rows": 0}
    assert (idle["tid"], idle["ts"], idle["dur"]) == (IDLE_TRACK, 50.25, 1)


def test_a_timeline_writes_from_when_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "b.trace.json"
    timeline = RecordedTimeline(lambda: 0.0)
    with timeline.phase(Phase.SCHEDULE, 1):
        pass
    timeline.write_to(TraceFile(path))
    with timeline.phase(Phase.SCHEDULE, 2):
        pass
    timeline.close()
    assert [event["args"] for event in spans(path)] == [{"step": 2}]
