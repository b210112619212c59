"""What planning was worth for batches of about one size, and when it is tried again."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from deepinfer.speculation.cost_tables import Times
from deepinfer.speculation.foregone_plans import ForegonePlans, Outcome
from deepinfer.speculation.round_times import HostTimes
from deepinfer.speculation.round_turns import Reckon, RoundTurns

SMOOTHING = 1.0 / 16.0
"""Weight of the newest step in running means."""
_PLANS_TO_JUDGE = 16
"""Gains of a batch size before their mean is believed."""
PLANS_OF_AGE = 2
"""Plans between a budget and survivals of drafts that it knew nothing of."""
_STEPS_TO_REST = 512
"""Steps of a fixed length after which planning is tried again where it did not pay."""
_MOST_STEPS_TO_REST = 8192
"""The same where plans were carried out and given up, again and again."""
STEPS_TO_TIME = 20
"""Steps of a fixed length before plans are looked at, in which the host's part is timed."""
_MOST_UNDECIDED = 16
"""Planned turns in which plans are not known to pay before they are given up."""
_Share = TypeVar("_Share", float, Times)
_SHARES = np.linspace(0.0, 1.0, 65)
"""Parts of a batch's drafts at which earlier rounds are remembered."""


@dataclass(slots=True)
class PlanRecord:
    """What planning was worth for batches of about one size, and what their drafts were.

    Attributes:
        gains: number of plans in the running means below.
        mean_tokens: expected tokens of a plan over those of all drafts; None before the first.
        mean_time: time of its round over that of a fixed one, by the tables.
        mean_gain: tokens over that time, less 1.
        mean_square: of the gains.
        num_fixed: steps for which no plan is made.
        num_rests: steps of the next rest.
        chosen: drafts a request of the newest plans, oldest first.
        profile: tokens by share of the drafts, of one request.
        fixed_host: the host's part of rounds of the fixed length.
        planned_host: the same of plans that were carried out since the last rest.
        turns: of planned and fixed rounds, while plans are carried out; None: they are not.
        foregone: plans that were not, and what came in their rounds.
        unread: the same, of fixed turns, not counted yet.
    """

    gains: int = 0
    mean_tokens: float | None = None
    mean_time: float = 1.0
    mean_gain: float = 0.0
    mean_square: float = 0.0
    num_fixed: int = 0
    num_rests: int = _STEPS_TO_REST
    chosen: deque[float] = field(default_factory=lambda: deque(maxlen=PLANS_OF_AGE))
    profile: Times | None = None
    fixed_host: HostTimes = field(default_factory=HostTimes)
    planned_host: HostTimes = field(default_factory=HostTimes)
    turns: RoundTurns | None = None
    foregone: ForegonePlans = field(default_factory=ForegonePlans)
    unread: list[Outcome] = field(default_factory=list)

    def add_plan(self, tokens: float, time: float) -> None:
        """Count a plan.

        Args:
            tokens: expected tokens of its drafts over those of all drafts.
            time: time of its round over that of a fixed one, by the tables.
        """
        self.gains += 1
        gain = tokens / time - 1.0
        # A plain mean at first, so that one step does not decide.
        weight = max(SMOOTHING, 1.0 / self.gains)
        if self.mean_tokens is None:
            self.mean_tokens, self.mean_time, self.mean_gain = tokens, time, gain
        self.mean_tokens += weight * (tokens - self.mean_tokens)
        self.mean_time += weight * (time - self.mean_time)
        self.mean_gain += weight * (gain - self.mean_gain)
        self.mean_square += weight * (gain * gain - self.mean_square)

    def real_time(self, time: _Share) -> _Share:
        """The same share of a fixed round's time, with what plans really save."""
        return time if self.turns is None else time**self.turns.saving

    @property
    def is_fixed(self) -> bool:
        """Whether no plan is made for the next step: in a rest, or by turns."""
        return self.num_fixed > 0 or (self.turns is not None and not self.turns.is_planned)

    @property
    def real_gain(self) -> float | None:
        """The mean gain, with tokens and times as they came; None before the first."""
        if self.turns is not None and self.turns.is_compared:
            return self._gain_at(self.mean_time * self.turns.ratio)
        return self._gain_at(self.real_time(self.mean_time))

    def _gain_at(self, time: float) -> float | None:
        """The mean gain if planned rounds take such a share of a fixed one's time."""
        if self.mean_tokens is None:
            return None
        return self.mean_tokens * self.foregone.correction / time - 1.0

    def pays(self, cost_noise: float) -> bool | None:
        """Whether the gain is above its noise; None: not known well enough.

        Of plans that are carried out it is False only where they are known to lose: until then
        both kinds take turns, and little is lost.
        """
        gain = self.real_gain
        if gain is None or self.gains < _PLANS_TO_JUDGE:
            return None
        variance = max(0.0, self.mean_square - self.mean_gain**2)
        error = math.sqrt(variance / min(self.gains, 1.0 / SMOOTHING))
        error = math.hypot(error, self.foregone.error)
        if self.turns is None:
            return gain > max(cost_noise, error)
        if not self.turns.is_compared:
            # A gain that dips below its noise is no reason to end what was begun.
            return True if gain > max(cost_noise, error) else None if gain > 0.0 else False
        # Rounds of both kinds are known: it does not matter how well their costs were.
        error = math.hypot(error, self.turns.error)
        if gain > error:
            return True
        # The error that few comparisons show is often far too small, by luck.
        errors = 2.0 * (1.0 + 8.0 / self.turns.num_compared)
        return False if gain < -errors * error else None

    def count_step(self, cost_noise: float, reckon: Reckon) -> None:
        """Count a step in a rest, or of a turn; at the end of a fixed turn plans are judged.

        Only then: rounds of both kinds are as new then, and known with the same host's times.
        """
        if self.num_fixed > 0:
            self.num_fixed -= 1
            return
        turns = self.turns
        if turns is None or not turns.count_step(reckon):
            return
        for outcome in self.unread:
            self.foregone.add(*outcome)
        self.unread.clear()
        pays = self.pays(cost_noise)
        newest = None if turns.newest is None else self._gain_at(turns.newest)
        if pays is not True and turns.is_compared and not turns.has_forgotten:
            # Now that it is known what rows really cost other plans are made: judge those.
            turns.forget()
            pays, self.gains = None, 0
        turns.judged(pays=pays is True, newest_pays=newest is not None and newest > 0.0)
        if turns.is_long:
            self.num_rests = _STEPS_TO_REST
        if pays is False or turns.num_undecided >= _MOST_UNDECIDED:
            self.give_up()

    def add_outcome(self, outcome: Outcome) -> None:
        """Count what came where a plan was not carried out.

        That takes the host about as long as a plan does. In a fixed turn it would make rounds
        longer that planned ones are compared with, so it is put off until the turn has ended.
        """
        if self.turns is None:
            self.foregone.add(*outcome)
        else:
            self.unread.append(outcome)

    def give_up(self) -> None:
        """Make no plans for a while."""
        self.num_fixed, self.gains = _STEPS_TO_REST, 0
        if self.turns is not None:
            # They were carried out and lost: each further try may cost as much.
            self.num_fixed = self.num_rests
            self.num_rests = min(2 * self.num_rests, _MOST_STEPS_TO_REST)
        self.planned_host, self.turns = HostTimes(), None
        self.chosen.clear()

    def add_tokens(self, tokens: Times) -> None:
        """Remember tokens by K, of a request by the share of its drafts."""
        places = np.linspace(0.0, 1.0, len(tokens))
        seen = np.interp(_SHARES, places, (tokens - tokens[0]) / tokens[0])
        old = seen if self.profile is None else self.profile
        self.profile = old + SMOOTHING * (seen - old)

    def foreseen(self, tokens: Times) -> Times | None:
        """[N + 1] tokens by K as earlier rounds had them; None before the first."""
        if self.profile is None:
            return None
        places = np.linspace(0.0, 1.0, len(tokens))
        foreseen: Times = tokens[0] * (1.0 + np.interp(places, _SHARES, self.profile))
        return foreseen
