"""The host's part of rounds: from how many on, and how new."""

from __future__ import annotations

from deepinfer.speculation.round_times import HostTimes


def times(*host_us: float) -> HostTimes:
    result = HostTimes()
    for each in host_us:
        result.add(each)
    return result


def test_few_rounds_say_nothing() -> None:
    assert times(*[100.0] * 3).median_us is None
    assert times(*[100.0] * 4).median_us == 100.0


def test_old_rounds_are_forgotten() -> None:
    assert times(*[1.0] * 16, *[2.0] * 16).median_us == 2.0


def test_rounds_that_are_slow_now_and_then_do_not_count() -> None:
    assert times(*[1.0, 1.0, 40.0, 1.0] * 4).median_us == 1.0
