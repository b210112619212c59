"""Cost tables: staircase at tiers, line beyond them, no noise that looks like a cheaper step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.device.errors import ConfigError
from deepinfer.speculation.cost_tables import CostTables, monotone


def test_rows_cost_what_their_tier_costs() -> None:
    costs = CostTables({1: 5.0}, {8: 100.0, 16: 150.0, 32: 170.0}, tiers=(8, 16, 32))
    times = costs.verify_times(32)
    assert times[0] == 0.0
    assert set(times[1:9]) == {100.0}
    assert set(times[9:17]) == {150.0}
    assert set(times[17:33]) == {170.0}


def test_beyond_the_tiers_the_line_goes_through_what_was_measured_there() -> None:
    costs = CostTables({1: 5.0}, {8: 100.0, 16: 150.0, 24: 200.0, 40: 280.0}, tiers=(8, 16))
    times = costs.verify_times(60)
    assert times[24] == 200.0
    assert times[32] == 240.0
    assert times[60] == 280.0 + 20 * 5.0
    assert times[17] == 165.0  # the same line backwards, not the one from the last tier


def test_one_point_beyond_the_tiers_is_no_slope() -> None:
    times = CostTables({1: 5.0}, {8: 100.0, 16: 90.0, 20: 80.0}, tiers=(8, 16)).verify_times(24)
    assert np.all(np.diff(times) >= 0.0)


def test_without_tiers_times_lie_on_lines() -> None:
    costs = CostTables({1: 10.0, 5: 30.0}, {2: 100.0, 4: 120.0, 8: 200.0})
    assert costs.verify_times(10).tolist() == [
        0.0, 90.0, 100.0, 110.0, 120.0, 140.0, 160.0, 180.0, 200.0, 220.0, 240.0,
    ]  # fmt: skip
    assert costs.draft_times(6).tolist() == [0.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0]


def test_an_outlier_is_shared_with_its_neighbours_and_lifts_no_others() -> None:
    assert monotone([10.0, 11.0, 30.0, 12.0, 24.0, 25.0]).tolist() == [
        10.0, 11.0, 21.0, 21.0, 24.0, 25.0,
    ]  # fmt: skip


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=30))
def test_monotone_times_rise_and_keep_their_sum(times: list[float]) -> None:
    result = monotone(times)
    assert len(result) == len(times)
    assert np.all(np.diff(result) >= -1e-9 * np.abs(result[1:]))
    assert np.isclose(result.sum(), sum(times))


@given(
    st.dictionaries(st.integers(1, 300), st.floats(1.0, 1e5), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_times_never_fall(points: dict[int, float], num_tiers: int) -> None:
    tiers = tuple(sorted(points)[:num_tiers])
    times = CostTables(points, points, tiers=tiers).verify_times(400)
    assert len(times) == 401
    assert np.all(times[1:] > 0.0)
    assert np.all(np.diff(times) >= 0.0)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (({}, {1: 1.0}, ()), "draft_us is empty"),
        (({1: 1.0}, {}, ()), "verify_us is empty"),
        (({1: 0.0}, {1: 1.0}, ()), r"draft_us says 0.0 us for 1"),
        (({1: 1.0}, {0: 1.0}, ()), r"verify_us says 1.0 us for 0"),
        (({1: 1.0}, {1: float("nan")}, ()), "verify_us says nan"),
        (({1: 1.0}, {1: 1.0}, (2,)), r"no time for \[2\]"),
        (({1: 1.0}, {1: 1.0, 2: 1.0}, (2, 1)), "not ascending"),
    ],
)
def test_tables_without_times_are_refused(
    tables: tuple[dict[int, float], dict[int, float], tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CostTables(*tables)
