"""`deepinfer eval`: its table, its files, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.cli import main


def test_scores_are_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, answers = tmp_path / "eval.json", tmp_path / "answers.jsonl"
    command = ["eval", "--tasks", "add", "--limit", "2", "--out", str(report)]
    assert main([*command, "--answers", str(answers)]) == 0
    shown = capsys.readouterr().out
    assert "2digit" in shown
    assert "std. error" in shown
    figures = json.loads(report.read_text())["figures"]
    assert [(s["task"], s["group"], s["num_items"]) for s in figures["scores"]] == [
        ("add", "2digit", 2),
        ("add", "3digit", 2),
    ]
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 4
    assert lines[0].keys() == {
        "task", "control", "group", "num_prompt_tokens", "expected", "answer", "exact"
    }  # fmt: skip


def test_both_replay_modes_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "eval.json"
    command = ["eval", "--replay", "both", "--tasks", "add", "--limit", "1", "-q"]
    assert main([*command, "--set", "replay.keep_tokens=32", "--out", str(report)]) == 0
    assert "from 94 on" in " ".join(capsys.readouterr().out.split())
    figures = json.loads(report.read_text())["figures"]
    assert figures["distributions"] is None
    assert figures["lossless_keep_tokens"] == 94
    assert [entry["group"] for entry in figures["tasks"]] == ["2digit", "3digit"]
    assert all(0 <= entry["bounded_share"] <= 1 for entry in figures["tasks"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "sums"], "tasks are sums; expected some of"),
        (["--limit", "0"], "--limit is 0"),
        (["--replay", "both", "--answers", "a.jsonl"], "--answers goes with one replay mode"),
        (["--replay", "both", "--tasks", "sums"], "tasks are sums; expected some of"),
        (
            ["--replay", "both", "--tasks", "bpb", "--set", "replay.keep_tokens=9"],
            "replay.keep_tokens = 9 is less",
        ),
        (["--quick", "--limit", "3"], "--quick is --limit 8"),
        (["--answers", "nowhere/answers.jsonl"], "there is no folder nowhere"),
        (["--set", "measurement.selections=random"], "measurement is selections_random"),
    ],
)
def test_bad_options_are_refused_before_the_work(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *options]) == 2
    assert message in capsys.readouterr().err
