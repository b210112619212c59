"""The line that says what came of drafts."""

from __future__ import annotations

import pytest

from deepinfer.cli.speculation_line import show_speculation
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
