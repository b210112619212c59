"""How long rounds really take: the host's part of them, and all of it beside what was reckoned."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

_NUM_KEPT = 16
_NUM_NEW = 4
"""Rounds after which the medians are taken anew."""
_FEWEST = 8
"""Rounds before there are medians."""
_ERROR_OF_MEDIAN = 1.4826 * 1.2533
"""Standard error of a normal sample's median times sqrt(count), by the median distance to it."""


class Round(NamedTuple):
    """A decode step from the commit of the one before it to its own.

    Attributes:
        num_sampling: R requests that sampled.
        num_rows: its rows at most.
        is_planned: whether its budget was a plan's.
        time_us: all of it.
        host_us: without the host's waits for the device.
    """

    num_sampling: int
    num_rows: int
    is_planned: bool
    time_us: float
    host_us: float


class RoundTimes:
    """Medians over the newest rounds of one kind, which a single slow round does not move.

    Graphs that are captured on the way, prompts of others and pauses of the caller make single
    rounds slow by any factor, so that a mean would say nothing.

    Attributes:
        host_us: what the host needs for a step, its waits left out; None: not known yet.
        ratio: time of a round over the time that was reckoned; None: not known yet.
        error: standard error of `ratio`, as a share of it.
    """

    def __init__(self) -> None:
        """No round is known."""
        self._hosts: deque[float] = deque(maxlen=_NUM_KEPT)
        self._rounds: deque[tuple[float, float]] = deque(maxlen=_NUM_KEPT)
        self._num_new = 0
        self.host_us: float | None = None
        self.ratio: float | None = None
        self.error = 0.0

    def add(self, host_us: float, device_us: float, time_us: float, *, overlaps: bool) -> None:
        """Count a round.

        Args:
            host_us: what the host needed for it.
            device_us: what the device was to need, by the cost tables.
            time_us: how long it was.
            overlaps: whether host and device work at once, or by turns.
        """
        self._hosts.append(host_us)
        self._rounds.append((device_us, time_us))
        self._num_new += 1
        if self._num_new < _NUM_NEW or len(self._hosts) < _FEWEST:
            return
        self._num_new = 0
        # All of them with the same host's time: what was known when each came is another for each.
        host = self.host_us = statistics.median(self._hosts)
        ratios = [
            time / (max(device, host) if overlaps else device + host)
            for device, time in self._rounds
        ]
        median = self.ratio = statistics.median(ratios)
        distance = statistics.median(abs(ratio - median) for ratio in ratios)
        self.error = _ERROR_OF_MEDIAN * distance / median / math.sqrt(len(ratios))
