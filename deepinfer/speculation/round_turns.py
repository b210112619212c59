"""Planned and fixed rounds by turns, and how long ones take beside the others.

A machine has slow spells: another process, a lower clock, a minute long and up to a third of its
speed. Rounds of now beside those of some minutes ago say little then. So the two kinds take turns
of a few steps, each planned turn is compared with the fixed turns before and after it, and the
median of many such comparisons counts. Where plans pay, their turns grow longer.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from deepinfer.speculation.median_error import median_error

_SHORTEST = 8
"""Steps of a turn."""
_LONGEST = 256
"""Steps of a planned turn where plans have paid for long."""
_TIMED = 4
"""Timed rounds that a turn waits for; with fewer it is not compared."""
_MOST_WAIT = 24
"""Steps beyond its length that a turn waits for them: prompts in between leave few to time."""
_NUM_COMPARED = 16
"""Newest comparisons that count."""
_FEWEST_COMPARED = 4
"""Comparisons before there is a ratio."""
_LEAST_SAVING = 0.05
"""Share of a round that plans are to save, below which nothing is learned about the tables."""
_MOST_SAVING = 2.0

Reckon = Callable[[float, bool], float]
"""Microseconds that a round was to take: by those of the device, and whether it is planned."""


class _Timed(NamedTuple):
    device_us: float
    time_us: float


_Rounds = list[_Timed]


class RoundTurns:
    """Whose turn it is, and what came of the turns until now. It begins with a fixed one.

    Attributes:
        is_planned: whose turn it is.
        ratio: time of planned rounds over fixed ones, each over what was reckoned; 1 until it is
            known.
        error: standard error of `ratio`, as a share of it.
        saving: logarithm of the time of planned rounds over fixed ones, over that of what was
            reckoned: a round that takes a share t of a fixed one's by the tables takes t ** saving.
            1 until it is known.
        newest: time of planned rounds over fixed ones in the newest comparison alone; None: the
            turns that ended last had too few rounds that were timed, or there were none.
        num_compared: comparisons that count.
        has_forgotten: whether comparisons were forgotten once.
        num_undecided: planned turns since plans were last known to pay.
        is_long: whether planned turns are as long as they get.
    """

    def __init__(self) -> None:
        """No turn was taken."""
        self.is_planned = False
        self.ratio, self.error, self.saving = 1.0, 0.0, 1.0
        self.has_forgotten = False
        self.newest: float | None = None
        self.num_undecided = 0
        self._planned_steps = _SHORTEST
        self._num_steps = 0
        self._rounds: _Rounds = []
        # Those of the turns before, empty if too few were timed.
        self._has_planned = False
        self._before: _Rounds = []
        self._planned: _Rounds = []
        self._compared: deque[tuple[_Rounds, _Rounds, _Rounds, _Rounds]] = deque(
            maxlen=_NUM_COMPARED
        )

    @property
    def is_long(self) -> bool:
        return self._planned_steps == _LONGEST

    @property
    def is_compared(self) -> bool:
        """Whether there are comparisons enough."""
        return len(self._compared) >= _FEWEST_COMPARED

    @property
    def num_compared(self) -> int:
        return len(self._compared)

    def add(self, device_us: float, time_us: float, *, is_planned: bool) -> None:
        """Count a round.

        Args:
            device_us: what the device was to need, by the cost tables.
            time_us: how long it was.
            is_planned: whether a plan was carried out in it. Of the other kind than the turn's,
                it began before the turn.

        A round that took no time by the engine's clock is of a clock that stands, and left out.
        """
        if is_planned == self.is_planned and time_us > 0.0:
            self._rounds.append(_Timed(device_us, time_us))

    def count_step(self, reckon: Reckon) -> bool:
        """Count a step of this turn; whether it ends a fixed one that follows a planned one.

        Args:
            reckon: with what is known of the host by now. All rounds are reckoned by the same.
        """
        self._num_steps += 1
        length = self._planned_steps if self.is_planned else _SHORTEST
        is_timed = len(self._rounds) >= _TIMED or self._num_steps >= length + _MOST_WAIT
        if self._num_steps < length or not is_timed:
            return False
        turn, self._rounds, self._num_steps = self._rounds, [], 0
        self.is_planned = not self.is_planned
        if len(turn) < _TIMED:
            turn = []  # what comes next has nothing to stand beside
        if not self.is_planned:
            self._planned, self._has_planned = turn, True
            return False
        self.newest = None
        if self._before and self._planned and turn:
            # Of a long turn the rounds that are near to those they are compared with.
            first, last = self._planned[:_SHORTEST], self._planned[-_SHORTEST:]
            self._compared.append((self._before, first, last, turn))
            self._compare(reckon)
        self._before, self._planned = turn, []
        return self._has_planned

    def judged(self, *, pays: bool, newest_pays: bool) -> None:
        """Hear what a planned turn was worth, for the length of the next ones.

        Args:
            pays: whether plans are known to.
            newest_pays: whether they did by the newest comparison alone.
        """
        if self.newest is None:
            self.num_undecided += 1
            return
        self.num_undecided = 0 if pays else self.num_undecided + 1
        if not pays:
            self._planned_steps = _SHORTEST
        elif newest_pays:
            self._planned_steps = min(2 * self._planned_steps, _LONGEST)
        else:
            # Chance, or the machine has changed: find out soon.
            self._planned_steps = max(self._planned_steps // 4, _SHORTEST)

    def forget(self) -> None:
        """Compare anew: plans are made in another way. What they save remains known."""
        self._compared.clear()
        self.ratio, self.error, self.has_forgotten = 1.0, 0.0, True

    def _compare(self, reckon: Reckon) -> None:
        reckoned, beside = [], []
        for before, first, last, after in self._compared:
            pairs = ((first, before), (last, after))
            logs = [_middle(planned) - _middle(fixed) for planned, fixed in pairs]
            tables = [
                _middle(planned, reckon, is_planned=True) - _middle(fixed, reckon)
                for planned, fixed in pairs
            ]
            reckoned.append(sum(tables) / 2.0)
            beside.append((sum(logs) - sum(tables)) / 2.0)
        self.newest = math.exp(reckoned[-1] + beside[-1])
        if len(beside) < _FEWEST_COMPARED:
            return
        median = statistics.median(beside)
        self.ratio = math.exp(median)
        table = statistics.median(reckoned)
        if table < -_LEAST_SAVING:
            self.saving = min(max(0.0, 1.0 + median / table), _MOST_SAVING)
        self.error = median_error(beside)


def _middle(rounds: _Rounds, reckon: Reckon | None = None, *, is_planned: bool = False) -> float:
    """Logarithm of the median time, or of the median of what was reckoned."""
    if reckon is None:
        return math.log(statistics.median(each.time_us for each in rounds))
    return math.log(statistics.median(reckon(each.device_us, is_planned) for each in rounds))
