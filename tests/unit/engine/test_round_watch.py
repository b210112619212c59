"""Times of rounds: which are told, of what, and when."""

from __future__ import annotations

from deepinfer.device.runtime import StepKind
from deepinfer.engine.round_watch import RoundWatch
from deepinfer.engine.step_state import SchedulerOutputs
from deepinfer.speculation.round_times import Round


class Clock:
    def __init__(self) -> None:
        self.now_us = 1000.0

    def __call__(self) -> float:
        return self.now_us

    def work(self, duration_us: float) -> None:
        self.now_us += duration_us


def step(
    number: int, budget: int | None = None, kind: StepKind = StepKind.DECODE
) -> SchedulerOutputs:
    return SchedulerOutputs(number, kind, (), budget)


def commits(*steps: SchedulerOutputs) -> list[Round | None]:
    """Rounds of 100 us each, 30 us of them waiting, as they are handed out."""
    clock = Clock()
    watch, told = RoundWatch(clock), []
    for scheduled in steps:
        clock.work(70.0)
        watch.wait(lambda: clock.work(30.0))
        told.append(watch.committed(scheduled))
    return told


def test_a_round_is_told_one_commit_late_with_the_hosts_part() -> None:
    told = commits(*[step(number) for number in range(5)])
    whole = Round(0, 0, False, 100.0, 70.0)
    # The third of a kind is the first that is timed.
    assert told == [None, None, None, whole, whole]


def test_rounds_around_a_change_of_kind_are_not_told() -> None:
    told = commits(*[step(number, budget=4 if number >= 4 else None) for number in range(9)])
    kinds = [None if each is None else each.is_planned for each in told]
    assert kinds == [None, None, None, False, False, None, None, True, True]


def test_prompts_and_steps_that_were_left_out_interrupt() -> None:
    prompt = step(3, kind=StepKind.PREFILL)
    told = commits(step(0), step(1), step(2), prompt, step(4), step(5), step(6), step(7))
    assert [each is not None for each in told] == [False] * 3 + [True] + [False] * 3 + [True]
    told = commits(step(0), step(1), step(3), step(4), step(5))
    assert told == [None] * 5


def test_a_pause_leaves_nothing_of_what_went_before() -> None:
    clock = Clock()
    watch = RoundWatch(clock)
    for number in range(3):
        clock.work(100.0)
        assert watch.committed(step(number)) is None
    watch.pause()
    told = []
    for number in range(5, 9):
        clock.work(100.0)
        told.append(watch.committed(step(number)))
    assert told == [None, None, None, Round(0, 0, False, 100.0, 100.0)]


def test_what_waiting_gives_is_handed_on() -> None:
    assert RoundWatch(Clock()).wait(lambda: 7) == 7
