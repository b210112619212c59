"""The time of each decode round as the host sees it, and the part that it did not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from deepinfer.engine.step_state import SchedulerOutputs
from deepinfer.speculation.round_times import Round, RoundKind

_T = TypeVar("_T")

_STEPS_ALIKE = 3
"""Decode steps in a row, of one kind, whose last one is timed: the host works for the next steps
while the device computes one, so that a round after a change is of both kinds."""


class RoundWatch:
    """Times rounds by the commits of their steps.

    A round is handed out one commit late. At that of a step the drafts of the next one are drawn,
    and what they are might show in how long it took; what is decided about them may not know it.
    """

    def __init__(self, clock_us: Callable[[], float]) -> None:
        """Nothing timed yet.

        Args:
            clock_us: monotonic microseconds.
        """
        self._clock_us = clock_us
        self._waited_us = 0.0
        self._last_us = 0.0
        self._last: tuple[int, RoundKind] | None = None
        self._num_alike = 0
        self._held: Round | None = None

    def wait(self, collect: Callable[[], _T]) -> _T:
        """Call something that waits for the device, and count its time as waiting."""
        begin_us = self._clock_us()
        result = collect()
        self._waited_us += self._clock_us() - begin_us
        return result

    def pause(self) -> None:
        """Forget what went before: a step is committed whose time nobody wants."""
        self._last, self._num_alike, self._held = None, 0, None

    def committed(self, scheduled: SchedulerOutputs, kind: RoundKind | None) -> Round | None:
        """Hear that a step is committed; the round before, if it can be told.

        Args:
            scheduled: the step.
            kind: what the planner had to do with it; None: it is no decode step.
        """
        now_us, handed_out, self._held = self._clock_us(), self._held, None
        time_us, waited_us = now_us - self._last_us, self._waited_us
        self._last_us, self._waited_us = now_us, 0.0
        if kind is None:
            self._last, self._num_alike = None, 0
            return handed_out
        follows = self._last == (scheduled.step - 1, kind)
        self._last = scheduled.step, kind
        self._num_alike = self._num_alike + 1 if follows else 1
        if self._num_alike >= _STEPS_ALIKE:
            self._held = Round(
                len(scheduled.sequences),
                scheduled.num_rows,
                kind,
                time_us,
                time_us - waited_us,
            )
        return handed_out
