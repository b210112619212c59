"""The line that says what came of drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.cli.speculation_line import show_speculation
from deepinfer.device.errors import ConfigError
from deepinfer.speculation.metrics import SpeculationMetrics


def test_no_drafts_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_speculation(None) == {}
    assert show_speculation(SpeculationMetrics(3)) == {}
    assert capsys.readouterr().err == ""


def test_means_of_a_round_and_shares_by_place(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = SpeculationMetrics(3)
    metrics.add_step([3, 3], [2, 2], [2, 1])
    figures = show_speculation(metrics)
    words = " ".join(capsys.readouterr().err.split())
    assert "2.00 verified, 1.50 accepted" in words
    assert words.endswith("if those before were: 100% 50% -")
    assert figures == {"speculation": metrics.figures()}


def test_picture_is_drawn_of_drafts_and_refused_without_them(tmp_path: Path) -> None:
    metrics = SpeculationMetrics(2)
    with pytest.raises(ConfigError, match="no step had drafts; set speculation"):
        show_speculation(metrics, tmp_path / "drafts.svg")
    metrics.add_step([2], [2], [1])
    show_speculation(metrics, tmp_path / "drafts.svg")
    assert "place in the block" in (tmp_path / "drafts.svg").read_text()
