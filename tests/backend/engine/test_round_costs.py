"""Cost tables of the bundled checkpoint on the reference backend, through the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cli import main
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.engine.step_timer import ModelStepTimer
from deepinfer.model.forwarded import Forwarded
from deepinfer.model.loading import load_model
from deepinfer.model.step_batch import StepBatch
from deepinfer_reference.graph import ReferenceGraph
from tests.backend.engine.conftest import GOLDEN, ReplayingBackend

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


def test_costs_are_those_of_replayed_passes_where_steps_are_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each point is captured once, at the capacity of its tier, and replayed for every time."""
    backend = ReplayingBackend(BackendConfig("reference", Numerics.EXACT, {"runtime": "inline"}))
    captured: list[ReferenceGraph] = []
    capture = backend.runtime.capture

    def counted(work: Callable[[], None]) -> ReferenceGraph:
        captured.append(capture(work))
        return captured[-1]

    monkeypatch.setattr(backend.runtime, "capture", counted)
    loaded = load_model(GOLDEN / "tiny_a/checkpoint", backend, max_positions=64, with_drafter=True)
    assert loaded.drafter is not None
    timer = ModelStepTimer(
        backend, loaded.backbone, loaded.drafter, max_num_seqs=3, max_drafts=2, max_model_len=64
    )
    assert timer.tiers == (1, 2, 3, 4, 6, 8, 12)
    shapes: list[tuple[int, int]] = []
    step = loaded.backbone.step

    def seen(batch: StepBatch, *rest: Any) -> Forwarded:  # noqa: ANN401
        shapes.append((batch.query_lens.shape[0], batch.input_ids.shape[0]))
        return step(batch, *rest)

    monkeypatch.setattr(loaded.backbone, "step", seen)
    times = [timer.verify_us(5), timer.verify_us(5), timer.draft_us(3), timer.draft_us(3)]
    assert min(times) > 0.0
    assert len(captured) == 2
    assert set(shapes) == {(4, 6)}
    backend.close()
