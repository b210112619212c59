"""Medians of rounds: from how many on, how new, how sure."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.speculation.round_times import RoundTimes


def times(*ratios: float, host_us: float = 100.0) -> RoundTimes:
    result = RoundTimes()
    for ratio in ratios:
        result.add(host_us, ratio)
    return result


def test_few_rounds_say_nothing() -> None:
    few, enough = times(*[1.0] * 7), times(*[1.5] * 8)
    assert (few.host_us, few.ratio, few.error) == (None, None, 0.0)
    assert (enough.host_us, enough.ratio, enough.error) == (100.0, 1.5, 0.0)


def test_old_rounds_are_forgotten() -> None:
    tested = times(*[1.0] * 16, *[2.0] * 16)
    assert tested.ratio == 2.0
    for _ in range(16):
        tested.add(50.0, 2.0)
    assert tested.host_us == 50.0


def test_rounds_that_are_slow_now_and_then_do_not_count() -> None:
    assert times(*[1.0, 1.0, 40.0, 1.0] * 4).ratio == 1.0


def test_the_error_is_that_of_the_median_of_normal_rounds() -> None:
    generator = np.random.default_rng(1)
    found = [times(*generator.normal(1.0, 0.05, 16).tolist()) for _ in range(400)]
    spread = float(np.std([each.ratio for each in found if each.ratio is not None]))
    assert np.mean([each.error for each in found]) == pytest.approx(spread, rel=0.25)
