"""The command around a batch run, with a scripted engine in place of the real one."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.batch.run import BatchEngine
from deepinfer.cli.main import main

CHECKPOINT = Path(__file__).parents[2] / "data/golden/tiny_a/checkpoint"
Line = Callable[..., bytes]
InputFile = Callable[..., Path]
Command = Callable[..., int]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, engine: BatchEngine, tmp_path: Path
) -> Callable[..., int]:
    """Runs `deepinfer batch run` on an input file; the output is out.jsonl."""
    module = types.ModuleType("deepinfer.engine.llm_engine")
    factory = types.SimpleNamespace(from_config=lambda config, timeline_file: engine)
    monkeypatch.setattr(module, "LLMEngine", factory, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def start(path: Path, *options: str) -> int:
        output = str(tmp_path / "out.jsonl")
        words = ["batch", "run", "-i", str(path), "-o", output, "--checkpoint", str(CHECKPOINT)]
        return main([*words, *options])

    return start


def test_all_answered_is_exit_code_0(
    command: Command, input_file: InputFile, line: Line, tmp_path: Path
) -> None:
    assert command(input_file(line("a"))) == 0
    record = json.loads((tmp_path / "out.jsonl").read_bytes())
    assert record["response"]["body"]["model"] == "checkpoint"


def test_some_failed_is_exit_code_1(command: Command, input_file: InputFile, line: Line) -> None:
    assert command(input_file(line("a"), b"{}\n")) == 1


def test_run_that_cannot_begin_is_exit_code_2(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "nothing.jsonl") == 2
    assert "nothing.jsonl is not a file" in capsys.readouterr().err


def test_second_run_needs_overwrite(command: Command, input_file: InputFile, line: Line) -> None:
    path = input_file(line("a"))
    assert [command(path), command(path), command(path, "--overwrite")] == [0, 2, 0]


def test_configuration_is_kept_beside_the_results(
    command: Command, input_file: InputFile, line: Line, tmp_path: Path
) -> None:
    command(input_file(line("a")), "--set", "scheduler.max_num_seqs=3")
    kept = json.loads((tmp_path / "out.jsonl.config.json").read_text(encoding="utf-8"))
    assert kept["config"]["scheduler"]["max_num_seqs"] == 3


def test_configured_sampling_is_the_default_of_every_line(
    command: Command, input_file: InputFile, line: Line, tmp_path: Path
) -> None:
    command(input_file(line("a"), line("b", max_tokens=2)), "--set", "sampling.max_tokens=5")
    records = map(json.loads, (tmp_path / "out.jsonl").read_bytes().splitlines())
    usages = {r["custom_id"]: r["response"]["body"]["usage"] for r in records}
    assert [usages[name]["completion_tokens"] for name in "ab"] == [5, 2]


def test_report_has_the_figures(
    command: Command, input_file: InputFile, line: Line, tmp_path: Path
) -> None:
    command(input_file(line("a", max_tokens=4), b"{}\n"), "--json", str(tmp_path / "r.json"))
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["command"] == "batch run"
    assert report["figures"]["num_requests"] == 2
    assert report["figures"]["completion_tokens"] == 4
    assert report["figures"]["error_codes"] == {"invalid_field": 1}


def test_print_shows_prompt_and_answer_and_errors(
    command: Command, input_file: InputFile, line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    command(input_file(line("a", max_tokens=2), line("b", prompt="refuse")), "--print")
    shown = capsys.readouterr().out
    assert "[a]\nhelloaa\n" in shown
    assert "[b]\nprompt has 99 tokens" in shown


def test_without_print_nothing_is_on_standard_output(
    command: Command, input_file: InputFile, line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    command(input_file(line("a")))
    assert capsys.readouterr().out == ""


def test_demo_file_has_only_good_lines() -> None:
    from deepinfer.batch.reader import read_requests
    from deepinfer.batch.request import BatchRequest

    demo = Path(__file__).parents[3] / "examples/demo.jsonl"
    assert all(isinstance(item, BatchRequest) for item in read_requests(demo))
