"""How long rounds really take, as the engine tells the planner."""

from __future__ import annotations

import enum
import statistics
from collections import deque
from typing import NamedTuple

_NUM_KEPT = 8
_NUM_NEW = 4
"""Rounds after which the median is taken anew."""
_FEWEST = 4
"""Rounds before there is one."""


class RoundKind(enum.Enum):
    """What a planner had to do with a round.

    FIXED: nothing; all drafts are verified. WATCHED: it looked at a plan that is not carried out.
    PLANNED: its plan is carried out, which may be to verify all drafts.
    """

    FIXED = "fixed"
    WATCHED = "watched"
    PLANNED = "planned"


class Round(NamedTuple):
    """A decode step from the commit of the one before it to its own.

    Attributes:
        num_sampling: R requests that sampled.
        num_rows: its rows at most.
        kind: what the planner had to do with it.
        time_us: all of it.
        host_us: without the host's waits for the device.
    """

    num_sampling: int
    num_rows: int
    kind: RoundKind
    time_us: float
    host_us: float


class HostTimes:
    """The host's part of the newest rounds of one kind; a single slow round does not move it.

    Attributes:
        median_us: microseconds of a step, the host's waits left out; None: not known yet.
    """

    def __init__(self) -> None:
        """No round is known."""
        self._times: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_new = 0
        self.median_us: float | None = None

    def add(self, host_us: float) -> None:
        """Count a round."""
        self._times.append(host_us)
        self._num_new += 1
        if self._num_new >= _NUM_NEW and len(self._times) >= _FEWEST:
            self._num_new = 0
            self.median_us = statistics.median(self._times)
