"""What progress says."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from deepinfer.batch.progress import BarProgress, LogProgress, ProgressState, choose_progress


def _state(num_done: int = 5, *, num_failed: int = 0, elapsed_s: float = 10.0) -> ProgressState:
    return ProgressState(
        num_total=20,
        num_done=num_done,
        num_failed=num_failed,
        generated_tokens=100,
        kv_used_blocks=16,
        kv_total_blocks=64,
        elapsed_s=elapsed_s,
    )


def test_figures_are_rate_kv_use_and_remaining_time() -> None:
    assert _state().figures() == "10.0 tok/s, KV 25%, ETA 00:30"


def test_figures_count_failures() -> None:
    assert _state(num_failed=2).figures().endswith("2 failed")


def test_remaining_time_is_open_before_the_first_answer() -> None:
    assert "ETA --:--" in _state(0).figures()


def test_long_remaining_time_shows_hours() -> None:
    assert "ETA 3:00:00" in _state(elapsed_s=3600.0).figures()


def test_log_speaks_only_every_interval_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    view = LogProgress(interval_s=5.0, clock=lambda: now_s)
    with caplog.at_level(logging.INFO, logger="deepinfer.batch.progress"):
        for now_s in (1.0, 4.0, 6.0, 7.0):
            view.show(_state(int(now_s)))
        view.close()
    assert [record.getMessage().split()[0] for record in caplog.records] == ["6/20", "7/20"]


def test_bar_shows_requests_and_figures() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    view = BarProgress(console)
    view.show(_state())
    view.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "5/20 requests" in shown
    assert "KV 25%" in shown


def test_bar_is_for_terminals_only() -> None:
    assert isinstance(choose_progress(Console(file=io.StringIO())), LogProgress)
