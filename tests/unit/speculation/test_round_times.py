"""Medians of rounds: from how many on, how new, how sure."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.speculation.round_times import RoundTimes


def times(*ratios: float, host_us: float = 100.0) -> RoundTimes:
    result = RoundTimes()
    for ratio in ratios:
        result.add(host_us, 0.5 * host_us, host_us * ratio, overlaps=True)
    return result


def test_few_rounds_say_nothing() -> None:
    few, enough = times(*[1.0] * 7), times(*[1.5] * 8)
    assert (few.host_us, few.ratio, few.error) == (None, None, 0.0)
    assert (enough.host_us, enough.ratio, enough.error) == (100.0, 1.5, 0.0)


def test_old_rounds_are_forgotten() -> None:
    tested = times(*[1.0] * 16, *[2.0] * 16)
    assert tested.ratio == 2.0
    for _ in range(16):
        tested.add(50.0, 10.0, 100.0, overlaps=True)
    assert tested.host_us == 50.0


def test_rounds_that_are_slow_now_and_then_do_not_count() -> None:
    assert times(*[1.0, 1.0, 40.0, 1.0] * 4).ratio == 1.0


def test_the_error_is_that_of_the_median_of_normal_rounds() -> None:
    generator = np.random.default_rng(1)
    found = [times(*generator.normal(1.0, 0.05, 16).tolist()) for _ in range(400)]
    spread = float(np.std([each.ratio for each in found if each.ratio is not None]))
    assert np.mean([each.error for each in found]) == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize(("overlaps", "time_us"), [(True, 5000.0), (False, 6000.0)])
def test_the_first_rounds_are_judged_with_the_hosts_time_like_all_others(
    overlaps: bool, time_us: float
) -> None:
    found = RoundTimes()
    for _ in range(16):
        found.add(5000.0, 1000.0, time_us, overlaps=overlaps)
        assert found.ratio in (None, 1.0)
    assert found.ratio == 1.0
