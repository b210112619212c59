"""Driving a scripted engine through files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from deepinfer.batch.output_file import BatchFileError
from deepinfer.batch.progress import ProgressState
from deepinfer.batch.run import BatchEngine, run_batch
from deepinfer.batch.summary import BatchSummary
from deepinfer.device.errors import ContractError
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.text.tokenizer import TextTokenizer

Line = Callable[..., bytes]
InputFile = Callable[..., Path]
Run = Callable[..., BatchSummary]


class Scripted(BatchEngine, Protocol):
    """What the scripted engine shows beyond an engine."""

    aborted: list[str]
    calls: list[tuple[str, SamplingParams, int, float | None]]
    max_num_open: int


class _Watcher:
    """Remembers the progress it was told."""

    def __init__(self) -> None:
        self.states: list[ProgressState] = []
        self.num_closed = 0

    def show(self, state: ProgressState) -> None:
        self.states.append(state)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where results go."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def run(engine: BatchEngine, tokenizer: TextTokenizer, output: Path) -> Run:
    """Runs the scripted engine over an input file."""

    def start(path: Path, **more: Any) -> BatchSummary:  # noqa: ANN401
        return run_batch(engine, path, output, model_name="tiny", tokenizer=tokenizer, **more)

    return start


def _records(output: Path) -> list[dict[str, Any]]:
    data = output.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(row, parse_constant=pytest.fail) for row in data.splitlines()]


def _by_id(output: Path) -> dict[str, dict[str, Any]]:
    return {record["custom_id"]: record for record in _records(output)}


def test_every_line_is_answered(run: Run, output: Path, input_file: InputFile, line: Line) -> None:
    summary = run(input_file(line("a", max_tokens=2), line("b", max_tokens=3, n=2)))
    assert (summary.num_ok, summary.num_failed, summary.exit_code) == (2, 0, 0)
    assert (summary.prompt_tokens, summary.completion_tokens) == (10, 8)
    assert summary.finish_reasons == {"length": 3}
    choices = _by_id(output)["b"]["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "aaa"), (1, "aaa")]


def test_records_come_in_the_order_of_ending(
    run: Run, output: Path, input_file: InputFile, line: Line
) -> None:
    lengths = {"long": 100, "short": 1, "middle": 50}
    run(input_file(*(line(name, max_tokens=count) for name, count in lengths.items())))
    assert [record["custom_id"] for record in _records(output)] == ["short", "middle", "long"]
    for name, record in _by_id(output).items():
        assert record["response"]["body"]["usage"]["completion_tokens"] == lengths[name]


def test_bad_line_fails_alone_with_id_line_and_field(
    run: Run, output: Path, input_file: InputFile, line: Line
) -> None:
    bad = json.loads(line("b"))
    del bad["url"]
    summary = run(input_file(line("a"), json.dumps(bad).encode() + b"\n", line("c")))
    records = _by_id(output)
    assert records["b"]["error"]["line"] == 2
    assert records["b"]["error"]["field"] == "url"
    assert records["a"]["error"] is None
    assert records["c"]["error"] is None
    assert (summary.num_ok, summary.num_failed, summary.exit_code) == (2, 1, 1)
    assert summary.error_codes == {"invalid_field": 1}


def test_refused_request_fails_alone(
    run: Run, output: Path, input_file: InputFile, line: Line
) -> None:
    summary = run(input_file(line("a"), line("b", prompt="refuse"), line("c")))
    error = _by_id(output)["b"]["error"]
    assert (error["code"], error["line"]) == ("request_refused", 2)
    assert error["message"] == "prompt has 99 tokens; the context has 8"
    assert (summary.num_ok, summary.num_failed) == (2, 1)


def test_refused_field_is_named(run: Run, output: Path, input_file: InputFile, line: Line) -> None:
    run(input_file(line("a", prompt="refuse field")))
    assert _by_id(output)["a"]["error"]["field"] == "body.logit_bias"


def test_request_that_fails_keeps_its_tokens(
    run: Run, output: Path, input_file: InputFile, line: Line
) -> None:
    summary = run(input_file(line("a"), line("b", prompt="fail"), line("c", prompt="timeout")))
    records = _by_id(output)
    assert records["b"]["error"]["message"] == "non-finite logits at step 1"
    assert records["b"]["error"]["partial"][0]["text"] == "a"
    assert records["c"]["error"]["code"] == "timeout"
    assert (summary.num_ok, summary.exit_code) == (1, 1)


def test_open_requests_are_bounded(
    run: Run,
    engine: Scripted,
    output: Path,
    input_file: InputFile,
    line: Line,
) -> None:
    run(input_file(*(line(str(i), max_tokens=1 + i % 3) for i in range(50))), max_num_open=4)
    assert engine.max_num_open == 4
    assert len(_records(output)) == 50


def test_records_are_on_disk_while_others_run(
    run: Run, output: Path, input_file: InputFile, line: Line
) -> None:
    seen: list[int] = []
    run(
        input_file(line("a", max_tokens=1), line("b", max_tokens=5)),
        on_record=lambda request, record: seen.append(len(_records(output))),
    )
    assert seen == [1, 2]


def test_priority_and_time_limit_reach_the_engine(
    run: Run,
    engine: Scripted,
    input_file: InputFile,
    line: Line,
) -> None:
    run(input_file(b"\n", line("a", priority=3, timeout_s=1.5)))
    ((request_id, _, priority, timeout_s),) = engine.calls
    assert (request_id, priority, timeout_s) == ("batch-2", 3, 1.5)


def test_interrupt_withdraws_open_requests_and_keeps_whole_lines(
    run: Run,
    engine: Scripted,
    output: Path,
    input_file: InputFile,
    line: Line,
) -> None:
    path = input_file(line("a", max_tokens=1), line("x", prompt="interrupt"), line("b"))
    watcher = _Watcher()
    with pytest.raises(KeyboardInterrupt):
        run(path, max_num_open=1, progress=watcher)
    assert [record["custom_id"] for record in _records(output)] == ["a"]
    assert engine.aborted == ["batch-2"]
    assert watcher.num_closed == 1


def test_request_that_the_engine_forgets_is_our_fault(
    run: Run, input_file: InputFile, line: Line
) -> None:
    with pytest.raises(ContractError, match="batch-1"):
        run(input_file(line("a", prompt="lost")))


def test_existing_output_is_not_replaced(
    run: Run, output: Path, input_file: InputFile, line: Line
) -> None:
    output.write_text("precious", encoding="utf-8")
    with pytest.raises(BatchFileError, match="exists"):
        run(input_file(line("a")))
    assert output.read_text(encoding="utf-8") == "precious"


def test_existing_output_is_replaced_when_allowed(
    run: Run, output: Path, input_file: InputFile, line: Line
) -> None:
    output.write_text("old", encoding="utf-8")
    run(input_file(line("a")), overwrite=True)
    assert list(_by_id(output)) == ["a"]


def test_output_over_the_input_is_refused(
    engine: BatchEngine, tokenizer: TextTokenizer, input_file: InputFile, line: Line
) -> None:
    path = input_file(line("a"))
    with pytest.raises(BatchFileError, match="is the input"):
        run_batch(engine, path, path, model_name="t", tokenizer=tokenizer, overwrite=True)
    assert path.read_bytes() == line("a")


def test_missing_input_makes_no_output(run: Run, output: Path, tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="not a file"):
        run(tmp_path / "nothing.jsonl")
    assert not output.exists()


def test_empty_input_is_an_empty_output(run: Run, output: Path, input_file: InputFile) -> None:
    summary = run(input_file(b"\n"))
    assert (summary.num_requests, summary.exit_code) == (0, 0)
    assert output.read_bytes() == b""


def test_progress_is_not_told_of_every_step(run: Run, input_file: InputFile, line: Line) -> None:
    watcher = _Watcher()
    run(input_file(line("a", max_tokens=500)), progress=watcher)
    # Five hundred steps: they would have to take five seconds for half of these.
    assert 2 <= len(watcher.states) < 100
    assert watcher.states[-1].generated_tokens == 500


def test_progress_counts_up_to_the_total(run: Run, input_file: InputFile, line: Line) -> None:
    watcher = _Watcher()
    run(
        input_file(line("a", max_tokens=1), b"bad\n", line("b", max_tokens=2)),
        progress=watcher,
    )
    last = watcher.states[-1]
    assert [state.num_done for state in watcher.states] == [2, 3]
    assert (last.num_total, last.num_failed, last.generated_tokens) == (3, 1, 3)
    assert watcher.num_closed == 1
