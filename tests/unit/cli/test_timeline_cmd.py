"""Traces are written whole or cut short, read back, and drawn."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from deepinfer.cli.main import main
from deepinfer.cli.trace_events import read_trace
from deepinfer.device.errors import ConfigError
from deepinfer.device.runtime import StepKind
from deepinfer.engine.step_state import SchedulerOutputs
from deepinfer.engine.timeline import DeviceSpan, HostSpan, Phase
from deepinfer.engine.trace_file import DEVICE_TRACK, IDLE_TRACK, TraceFile

NUM_STEPS = 12


def write_trace(path: Path) -> TraceFile:
    """Steps of 100 us with 10 us of idleness after each, and some host work."""
    trace = TraceFile(path)
    for step in range(NUM_STEPS):
        begin_us = 5000.0 + 110 * step
        trace.host(HostSpan(Phase.WAIT, step, begin_us + 5, begin_us + 25))
        trace.host(HostSpan(Phase.LAUNCH, step, begin_us, begin_us + 30))
        scheduled = SchedulerOutputs(step, StepKind.DECODE, ())
        trace.device(DeviceSpan("forward", scheduled, begin_us + 2, begin_us + 102))
        if step:
            trace.idle(begin_us - 8, begin_us + 2)
    return trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A whole trace."""
    file = tmp_path / "run.trace.json"
    write_trace(file).close()
    return file


def test_a_trace_is_json_of_the_event_format(path: Path) -> None:
    events = json.loads(path.read_text())
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"host", "device", "device idle"}
    forwards = [event for event in events if event["name"] == "decode forward"]
    assert [event["args"]["step"] for event in forwards] == list(range(NUM_STEPS))
    assert all(event["dur"] == 100 for event in forwards)
    begins = {event["id"] for event in events if event["ph"] == "s"}
    assert begins == {event["id"] for event in events if event["ph"] == "f"}


def test_sums_are_read_back(path: Path) -> None:
    trace = read_trace(path)
    assert trace.total_us(DEVICE_TRACK) == 100 * NUM_STEPS
    assert trace.total_us(IDLE_TRACK) == 10 * (NUM_STEPS - 1)
    assert trace.host_us() == {"launch": 10 * NUM_STEPS, "wait": 20 * NUM_STEPS}


def test_phases_that_follow_each_other_are_not_inside_each_other(tmp_path: Path) -> None:
    file = tmp_path / "run.trace.json"
    trace = TraceFile(file)
    third_us = 1000 / 3
    for step in range(30):
        begin_us = 2 * step * third_us
        trace.host(HostSpan(Phase.COMMIT, step, begin_us, begin_us + third_us))
        trace.host(HostSpan(Phase.OUTPUT, step, begin_us + third_us, begin_us + 2 * third_us))
    trace.device(DeviceSpan("forward", SchedulerOutputs(0, StepKind.DECODE, ()), 0.0, 1.0))
    trace.close()
    assert read_trace(file).host_us() == pytest.approx(
        {"commit": 10_000.0, "output": 10_000.0}, abs=0.1
    )


def test_a_trace_that_was_cut_short_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cut.trace.json"
    trace = write_trace(file)
    trace._file.flush()
    text = file.read_text()
    trace.close()
    file.write_text(text[:-15])
    assert read_trace(file).num_steps() == NUM_STEPS
    file.write_text(text.replace('"dur": 100', '"dur": ', 1))
    with pytest.raises(ConfigError, match="is no event of a trace"):
        read_trace(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no trace"), ("{}", "no trace"), ("[\n]\n", "no work of the device")],
)
def test_other_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(file)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--timeline .*existing folder"):
        TraceFile(tmp_path / "nowhere/run.json")


def test_plot_draws_the_steps_asked_for(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "plot", str(path), "--first-step", "3", "--steps", "4"]) == 0
    assert "steps 3 to 6" in capsys.readouterr().out
    root = ElementTree.fromstring(path.with_suffix(".svg").read_text())
    tips = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    forwards = [tip for tip in tips if tip.startswith("decode forward")]
    assert forwards == [f"decode forward, step {step}, 100 us" for step in (3, 4, 5, 6)]
    assert sum("idle" in tip for tip in tips) == 3
    texts = "".join(root.itertext())
    assert "12 steps in 0.001 s of the device, idle 8.40 %" in texts


def test_plot_names_the_steps_there_are(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "plot", str(path), "--first-step", "99"]) == 2
    assert "steps 0 to 11" in capsys.readouterr().err


def test_generate_writes_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, report = tmp_path / "run.trace.json", tmp_path / "report.json"
    prompt = ["generate", "Once", "--max-tokens", "6", "--temperature", "0", "--ignore-eos"]
    assert main([*prompt, "--timeline", str(file), "--json", str(report)]) == 0
    trace = read_trace(file)
    assert trace.num_steps() == 6
    figures = json.loads(report.read_text())["figures"]["timeline"]
    assert figures["num_steps"] == 6
    assert figures["idle_share"] == pytest.approx(trace.idle_share, abs=1e-3)
    assert set(figures["host_us"]) == {phase.value for phase in Phase}
    assert "6 steps in" in capsys.readouterr().err
