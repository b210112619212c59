"""Turns of planned and fixed rounds: how they are compared, and how long they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.speculation.round_turns import RoundTurns

SHORTEST, LONGEST = 8, 256
Times = Callable[[int, bool], float]
"""Time of a step by its number, and whether it is planned."""


def as_reckoned(device_us: float, is_planned: bool) -> float:
    return device_us


def take(
    tested: RoundTurns, num_steps: int, time_us: Times, *, pays: bool = True
) -> Iterator[tuple[bool, bool]]:
    """Run steps; for each whether it was planned and whether it ended a comparison."""
    for number in range(num_steps):
        is_planned = tested.is_planned
        device_us = 80.0 if is_planned else 100.0
        tested.add(device_us, time_us(number, is_planned), is_planned=is_planned)
        compared = False
        if tested.count_step(as_reckoned):
            compared = tested.newest is not None
            tested.judged(pays=pays, newest_pays=pays)
        yield is_planned, compared


def compared(
    num_comparisons: int, time_us: Times, *, pays: bool = False, most: int = 10_000
) -> RoundTurns:
    tested = RoundTurns()
    steps = take(tested, most, time_us, pays=pays)
    ends = itertools.islice((end for _, end in steps if end), num_comparisons)
    assert len(list(ends)) == num_comparisons
    return tested


def slower(share: float) -> Times:
    return lambda number, is_planned: 100.0 * (1.0 + share * is_planned)


def test_few_comparisons_say_nothing() -> None:
    few, enough = compared(3, slower(-0.1)), compared(4, slower(-0.1))
    assert (few.ratio, few.saving, few.error, few.is_compared) == (1.0, 1.0, 0.0, False)
    assert few.newest == pytest.approx(0.9)
    # The tables say a fifth.
    assert enough.ratio == pytest.approx(0.9 / 0.8)
    assert enough.saving == pytest.approx(math.log(0.9) / math.log(0.8))
    assert enough.error == pytest.approx(0.0, abs=1e-12)
    assert enough.is_compared


def test_it_is_what_is_saved_over_what_was_reckoned_with_the_hosts_part() -> None:
    tested = RoundTurns()
    for _ in range(200):
        is_planned = tested.is_planned
        tested.add(
            50.0 if is_planned else 90.0, 80.0 if is_planned else 100.0, is_planned=is_planned
        )
        if tested.count_step(lambda device_us, is_planned: device_us + 10.0):
            tested.judged(pays=False, newest_pays=False)
    assert tested.ratio == pytest.approx(0.8 / 0.6)
    assert tested.saving == pytest.approx(math.log(0.8) / math.log(0.6))


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_rounds_that_save_nothing_are_known(share: float) -> None:
    assert compared(4, slower(share)).saving == 0.0


def test_chance_makes_no_saving_of_any_size() -> None:
    """Of 6 % that are to be saved a noisy machine seems to save half of the time, or none."""
    generator = np.random.default_rng(2)
    for _ in range(50):
        tested = RoundTurns()
        while not tested.is_compared:
            device_us = 94.0 if tested.is_planned else 100.0
            time_us = device_us * float(generator.uniform(0.5, 1.5))
            tested.add(device_us, time_us, is_planned=tested.is_planned)
            tested.count_step(as_reckoned)
        assert 0.0 <= tested.saving <= 2.0


def test_what_is_forgotten_is_compared_anew_and_what_rows_cost_is_kept() -> None:
    tested = compared(4, slower(-0.1))
    saving = tested.saving
    tested.forget()
    assert (tested.ratio, tested.saving, tested.is_compared) == (1.0, saving, False)


def test_where_nothing_was_to_be_saved_the_tables_are_believed() -> None:
    tested = RoundTurns()
    generator = np.random.default_rng(0)
    for _ in range(300):
        tested.add(100.0, float(generator.normal(100.0, 10.0)), is_planned=tested.is_planned)
        if tested.count_step(as_reckoned):
            tested.judged(pays=False, newest_pays=False)
    assert tested.is_compared
    assert tested.saving == 1.0


@given(begin=st.integers(0, 150), length=st.integers(20, 400), slow=st.floats(1.05, 3.0))
def test_a_slow_spell_of_the_machine_does_not_move_it(begin: int, length: int, slow: float) -> None:
    """Rounds of both kinds one after the other would differ by all of it."""

    def time_us(number: int, is_planned: bool) -> float:
        spell = slow if begin <= number < begin + length else 1.0
        return 100.0 * spell * (0.9 if is_planned else 1.0)

    tested = compared(16, time_us)
    assert tested.ratio == pytest.approx(0.9 / 0.8, rel=1e-6)


def test_rounds_that_grow_longer_steadily_favour_no_kind() -> None:
    tested = compared(
        16, lambda number, is_planned: 1.002**number * (80.0 if is_planned else 100.0), pays=True
    )
    assert tested.saving == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_the_error_is_that_of_the_median_of_comparisons(noise: float) -> None:
    generator = np.random.default_rng(1)

    def scatter() -> float:
        return float(generator.normal(1.0, noise))

    found = [
        compared(16, lambda _, is_planned: (80.0 if is_planned else 100.0) * scatter())
        for _ in range(200)
    ]
    spread = float(np.std([each.ratio for each in found]))
    assert np.mean([each.error for each in found]) == pytest.approx(spread, rel=0.3)


def test_single_slow_rounds_do_not_count() -> None:
    """A graph is captured in two of the first planned rounds."""
    tested = compared(
        4, lambda number, is_planned: 1e6 if number in (8, 10) else 80.0 if is_planned else 100.0
    )
    assert tested.saving == pytest.approx(1.0)


def lengths(tested: RoundTurns, num_steps: int, time_us: Times, *, pays: bool) -> list[int]:
    """Steps of the planned turns."""
    kinds = [is_planned for is_planned, _ in take(tested, num_steps, time_us, pays=pays)]
    return [len(list(turn)) for is_planned, turn in itertools.groupby(kinds) if is_planned]


def test_turns_of_plans_that_pay_grow_longer() -> None:
    tested = RoundTurns()
    found = lengths(tested, 2000, slower(0.0), pays=True)
    assert found[:7] == [8, 16, 32, 64, 128, 256, 256]
    assert tested.is_long
    # Where they lose the next ones are short at once.
    found = lengths(tested, 300, slower(0.2), pays=False)
    assert found[1:] == [SHORTEST] * len(found[1:])
    assert len(found) > 2


def test_a_single_loss_makes_turns_shorter() -> None:
    tested = RoundTurns()
    list(take(tested, 2000, slower(0.0), pays=True))
    next(end for _, end in take(tested, 1000, slower(0.0)) if end)
    tested.judged(pays=True, newest_pays=False)
    found = lengths(tested, 300, slower(0.0), pays=True)
    assert found[:2] == [LONGEST // 4, LONGEST // 2]


def test_undecided_comparisons_are_counted_until_plans_pay() -> None:
    tested = compared(5, slower(0.0), pays=False)
    assert tested.num_undecided == 5
    tested.judged(pays=True, newest_pays=True)
    assert tested.num_undecided == 0


def test_turns_without_timed_rounds_end_and_are_compared_with_nothing() -> None:
    """Prompts come between all steps."""
    tested = RoundTurns()
    kinds = []
    for _ in range(300):
        kinds.append(tested.is_planned)
        if tested.count_step(as_reckoned):
            tested.judged(pays=True, newest_pays=True)
    assert set(kinds) == {False, True}
    assert max(len(list(turn)) for _, turn in itertools.groupby(kinds)) == SHORTEST + 24
    assert tested.newest is None
    assert tested.num_compared == 0
    # A planned turn begins and ends in 64 steps; that nothing was compared leaves it undecided.
    assert tested.num_undecided == 300 // 64


def test_a_clock_that_stands_says_nothing() -> None:
    tested = RoundTurns()
    assert not any(end for _, end in take(tested, 300, lambda number, is_planned: 0.0))
    assert tested.newest is None


def test_late_rounds_of_the_turn_before_do_not_count() -> None:
    tested = RoundTurns()
    while not tested.is_planned:
        tested.add(100.0, 100.0, is_planned=False)
        tested.count_step(as_reckoned)
    for _ in range(20):
        tested.add(100.0, 9e9, is_planned=False)
    steps = take(tested, 100, lambda number, is_planned: 100.0)
    assert any(end for _, end in steps)
    assert tested.newest == pytest.approx(1.0)
