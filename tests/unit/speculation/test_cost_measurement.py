"""Measuring cost tables on a timer that says what it is told, and keeping them in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.device.errors import ConfigError
from deepinfer.speculation.cost_file import load_costs, save_costs
from deepinfer.speculation.cost_measurement import measure_costs
from deepinfer.speculation.cost_tables import CostTables


class ScriptedTimer:
    """A device whose first run of each size is slow, and whose third one is disturbed."""

    def __init__(self, tiers: tuple[int, ...] = (), row_us: float = 2.0) -> None:
        self.tiers, self._row_us = tiers, row_us
        self.runs: dict[tuple[str, int], int] = {}

    def draft_us(self, num_requests: int) -> float:
        return self._run("draft", num_requests, 50.0 + num_requests)

    def verify_us(self, num_rows: int) -> float:
        return self._run("verify", num_rows, 100.0 + self._row_us * num_rows)

    def _run(self, what: str, count: int, time_us: float) -> float:
        key = (what, count)
        number = self.runs[key] = self.runs.get(key, 0) + 1
        return time_us * {1: 100.0, 3: 7.0}.get(number, 1.0)


def test_medians_leave_out_the_first_run_and_an_outlier() -> None:
    costs = measure_costs(ScriptedTimer(), max_num_seqs=6, max_rows=36)
    assert costs.draft_us == {count: 50.0 + count for count in (1, 2, 3, 4, 6)}
    assert sorted(costs.verify_us) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 36]
    assert all(value == 100.0 + 2.0 * count for count, value in costs.verify_us.items())
    assert costs.relative_noise == 0.0


def test_tiers_are_measured_where_they_are_and_beyond() -> None:
    costs = measure_costs(ScriptedTimer((4, 8, 16, 64)), max_num_seqs=6, max_rows=36)
    assert costs.tiers == (4, 8, 16)
    assert sorted(costs.verify_us) == [4, 8, 16, 24, 32, 36]


def test_a_slow_device_is_not_asked_five_times() -> None:
    timer = ScriptedTimer(row_us=5e6)
    measure_costs(timer, max_num_seqs=2, max_rows=4)
    assert set(timer.runs.values()) == {2}


def test_a_machine_that_slows_down_does_so_for_all_points() -> None:
    class Tiring(ScriptedTimer):
        num_runs = 0

        def _run(self, what: str, count: int, time_us: float) -> float:
            self.num_runs += 1
            return 100.0 * (1.0 + 0.01 * self.num_runs)

    costs = measure_costs(Tiring(), max_num_seqs=8, max_rows=48)
    times = [costs.verify_us[count] for count in sorted(costs.verify_us)]
    assert max(times) / min(times) < 1.1  # one point after another: 1.6
    assert costs.relative_noise > 0.05


def test_progress_is_told_before_each_pass_and_at_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    measure_costs(
        ScriptedTimer(), max_num_seqs=1, max_rows=2, progress=lambda *news: told.append(news)
    )
    assert told[:4] == [
        ("first draft of 1 requests", 0, 18),
        ("first verify of 1 rows", 1, 18),
        ("first verify of 2 rows", 2, 18),
        ("draft of 1 requests", 3, 18),
    ]
    assert told[-1] == ("done", 18, 18)
    assert [done for _, done, _ in told] == list(range(19))


COSTS = CostTables({1: 5.5, 4: 7.0}, {4: 100.25, 8: 120.0, 12: 150.0}, (4, 8), 0.01)
FACTS: dict[str, str | int] = {"device": "cpu", "max_num_seqs": 4, "checkpoint": "tiny"}


def test_saved_tables_come_back_as_they_were(tmp_path: Path) -> None:
    save_costs(tmp_path / "costs.json", COSTS, FACTS)
    assert load_costs(tmp_path / "costs.json", FACTS) == COSTS
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (FACTS | {"device": "npu"}, "device is 'npu' here and 'cpu' there"),
        (FACTS | {"max_num_seqs": 8}, "max_num_seqs is 8 here and 4 there"),
        (FACTS | {"numerics": "exact"}, "numerics is 'exact' here and None there"),
        ({"device": "cpu"}, "checkpoint is None here and 'tiny' there"),
    ],
)
def test_tables_of_another_configuration_are_refused(
    tmp_path: Path, facts: dict[str, str | int], message: str
) -> None:
    save_costs(tmp_path / "costs.json", COSTS, FACTS)
    with pytest.raises(ConfigError, match=message):
        load_costs(tmp_path / "costs.json", facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version 2"),
        ({"verify_us": {}}, "verify_us is empty"),
        ({"draft_us": [1]}, "holds no cost tables"),
        ({"facts": None}, "holds no cost tables"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "costs.json"
    save_costs(path, COSTS, FACTS)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_costs(path, FACTS)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_costs(tmp_path / "none.json", FACTS)
    with pytest.raises(ConfigError, match="cannot be written"):
        save_costs(tmp_path / "no" / "costs.json", COSTS, FACTS)
