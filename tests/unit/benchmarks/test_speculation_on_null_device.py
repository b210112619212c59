"""What the engine's planner does where the host is the limit, on virtual time alone."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import speculation_on_null_device as benchmark
from benchmarks.speculation_on_null_device import begin
from deepinfer.device.null import VirtualClock
from deepinfer.speculation.metrics import SpeculationMetrics


class ScriptedClock(VirtualClock):
    """Only made-up work takes time."""

    def read_us(self) -> float:
        return self.now_us


@pytest.fixture(autouse=True)
def _no_work_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "HostPacedClock", ScriptedClock)


def rate(mode: str, *, launch_us: float, depth: int = 1) -> tuple[float, SpeculationMetrics]:
    """Tokens per second of 24 sequences whose rows cost 30 us each beside 1 ms."""
    args = argparse.Namespace(
        steps=400, rounds=1, drafts=5, depth=depth, mean=0.6, launch_us=launch_us,
        draft_us=100.0, step_us=1000.0, row_us=30.0,
    )  # fmt: skip
    run = begin(args, mode, 24)
    run.block(400)
    metrics = run.engine.speculation
    run.engine.close()
    assert metrics is not None
    return run.rates[0], metrics


def num_planned(metrics: SpeculationMetrics) -> int:
    return sum(span.num_planned for span in metrics.spans)


def drafts_of_plans(metrics: SpeculationMetrics) -> float:
    """Drafts that a planned round verifies; all others verify all."""
    planned = num_planned(metrics)
    others = sum(span.num_steps for span in metrics.spans) - planned
    return float(metrics.places.verified.sum() - others * 24 * 5) / planned


@pytest.mark.parametrize("depth", [0, 1])
def test_where_the_device_is_the_limit_plans_pay(depth: int) -> None:
    fixed, _ = rate("fixed", launch_us=100.0, depth=depth)
    dynamic, metrics = rate("dynamic", launch_us=100.0, depth=depth)
    assert num_planned(metrics) > 300
    assert dynamic > 1.2 * fixed


def test_where_the_host_is_the_limit_nothing_is_planned_and_nothing_lost() -> None:
    fixed, _ = rate("fixed", launch_us=9000.0)
    dynamic, metrics = rate("dynamic", launch_us=9000.0)
    assert num_planned(metrics) == 0
    assert dynamic == pytest.approx(fixed)


def test_by_turns_the_hosts_time_makes_drafts_cheaper_and_not_free() -> None:
    """Without steps in flight the device's time is always paid for."""
    _, quick = rate("dynamic", launch_us=100.0, depth=0)
    _, slow = rate("dynamic", launch_us=9000.0, depth=0)
    assert num_planned(slow) > 300
    assert drafts_of_plans(slow) > 1.2 * drafts_of_plans(quick)
