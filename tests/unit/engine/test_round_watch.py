"""Times of rounds: which are told, of what, and when."""

from __future__ import annotations

from deepinfer.device.runtime import StepKind
from deepinfer.engine.round_watch import RoundWatch
from deepinfer.engine.step_state import SchedulerOutputs
from deepinfer.speculation.round_times import Round, RoundKind


class Clock:
    def __init__(self) -> None:
        self.now_us = 1000.0

    def __call__(self) -> float:
        return self.now_us

    def work(self, duration_us: float) -> None:
        self.now_us += duration_us


Commit = tuple[int, RoundKind | None]


def step(number: int, kind: RoundKind | None = RoundKind.FIXED) -> Commit:
    return number, kind


def commit(watch: RoundWatch, step: Commit) -> Round | None:
    number, kind = step
    step_kind = StepKind.PREFILL if kind is None else StepKind.DECODE
    return watch.committed(SchedulerOutputs(number, step_kind, ()), kind)


def commits(*steps: Commit) -> list[Round | None]:
    """Rounds of 100 us each, 30 us of them waiting, as they are handed out."""
    clock = Clock()
    watch, told = RoundWatch(clock), []
    for each in steps:
        clock.work(70.0)
        watch.wait(lambda: clock.work(30.0))
        told.append(commit(watch, each))
    return told


def test_a_round_is_told_one_commit_late_with_the_hosts_part() -> None:
    told = commits(*[step(number) for number in range(5)])
    whole = Round(0, 0, RoundKind.FIXED, 100.0, 70.0)
    # The third of a kind is the first that is timed.
    assert told == [None, None, None, whole, whole]


def test_rounds_around_a_change_of_kind_are_not_told() -> None:
    fixed, planned = RoundKind.FIXED, RoundKind.PLANNED
    told = commits(*[step(number, planned if number >= 4 else fixed) for number in range(9)])
    kinds = [None if each is None else each.kind for each in told]
    assert kinds == [None, None, None, fixed, fixed, None, None, planned, planned]


def test_prompts_and_steps_that_were_left_out_interrupt() -> None:
    prompt = step(3, None)
    told = commits(step(0), step(1), step(2), prompt, step(4), step(5), step(6), step(7))
    assert [each is not None for each in told] == [False] * 3 + [True] + [False] * 3 + [True]
    told = commits(step(0), step(1), step(3), step(4), step(5))
    assert told == [None] * 5


def test_a_pause_leaves_nothing_of_what_went_before() -> None:
    clock = Clock()
    watch = RoundWatch(clock)
    for number in range(3):
        clock.work(100.0)
        assert commit(watch, step(number)) is None
    watch.pause()
    told = []
    for number in range(5, 9):
        clock.work(100.0)
        told.append(commit(watch, step(number)))
    assert told == [None, None, None, Round(0, 0, RoundKind.FIXED, 100.0, 100.0)]


def test_what_waiting_gives_is_handed_on() -> None:
    assert RoundWatch(Clock()).wait(lambda: 7) == 7
