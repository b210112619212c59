"""Cost tables of the bundled checkpoint on the reference backend, through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.cli import main

LIMITS = ["--set", "scheduler.max_num_seqs=2", "--set", "max_model_len=64"]


def test_costs_are_measured_shown_kept_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, report, picture = (tmp_path / name for name in ("c.json", "r.json", "c.svg"))
    keep = ["--set", f"speculation.cost_table={table}"]
    arguments = ["backends", "--cost", *LIMITS, *keep, "--json", str(report)]
    assert main([*arguments, "--svg", str(picture)]) == 0
    assert "costs of a round on reference" in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")
    measured = json.loads(report.read_text())["figures"]["costs"]
    assert list(measured["draft_us"]) == ["1", "2"]
    assert list(measured["verify_us"]) == ["1", "2", "3", "4", "6", "8", "12"]
    assert all(value > 100.0 for value in measured["verify_us"].values())
    facts = json.loads(table.read_text())["facts"]
    assert facts["backend"] == "reference"
    assert facts["max_drafts"] == 5
    # The same times again: they were read, not measured.
    assert main(arguments) == 0
    assert json.loads(report.read_text())["figures"]["costs"] == measured


def test_costs_of_other_limits_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "costs.json"
    content = {
        "format_version": 1, "facts": {"max_num_seqs": 7}, "tiers": [], "relative_noise": 0.0,
        "draft_us": {"1": 1.0}, "verify_us": {"1": 1.0},
    }  # fmt: skip
    table.write_text(json.dumps(content))
    assert main(["backends", "--cost", *LIMITS, "--set", f"speculation.cost_table={table}"]) != 0
    assert "max_num_seqs is 2 here and 7 there" in capsys.readouterr().err


def test_a_picture_of_no_costs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backends", "--svg", str(tmp_path / "c.svg")]) != 0
    assert "add --cost" in capsys.readouterr().err
