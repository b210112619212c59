"""What planning was worth for batches of about one size, and when it is tried again."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from deepinfer.speculation.cost_tables import Times
from deepinfer.speculation.foregone_plans import ForegonePlans
from deepinfer.speculation.round_times import RoundTimes

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
_PLANS_PER_COMPARISON = 512
"""Planned steps after which fixed ones are timed again."""
_PLANS_OF_STALENESS = 64
"""The same before planning is given up."""
STEPS_TO_COMPARE = 20
"""Steps of a fixed length that are timed then, and before the first plan of a batch size."""
_SHARES = np.linspace(0.0, 1.0, 65)
"""Parts of a batch's drafts at which earlier rounds are remembered."""


@dataclass(slots=True)
class PlanRecord:
    """What planning was worth for batches of about one size, and what their drafts were.

    Attributes:
        gains: number of gains in the means below.
        mean_gain: running mean, as it is reckoned; None before the first.
        mean_square: of the gains.
        num_fixed: steps for which no plan is made.
        num_rests: steps of the next rest.
        num_carried_out: plans carried out since both kinds of rounds were compared.
        chosen: drafts a request of the newest plans, oldest first.
        profile: tokens by share of the drafts, of one request.
        fixed: rounds of the fixed length.
        planned: rounds of plans that were carried out since the last rest.
        foregone: plans that were not, and what came in their rounds.
    """

    gains: int = 0
    mean_gain: float | None = None
    mean_square: float = 0.0
    num_fixed: int = 0
    num_rests: int = _STEPS_TO_REST
    num_carried_out: int = 0
    chosen: deque[float] = field(default_factory=lambda: deque(maxlen=PLANS_OF_AGE))
    profile: Times | None = None
    fixed: RoundTimes = field(default_factory=RoundTimes)
    planned: RoundTimes = field(default_factory=RoundTimes)
    foregone: ForegonePlans = field(default_factory=ForegonePlans)

    def add_gain(self, gain: float) -> None:
        self.gains += 1
        # A plain mean at first, so that one step does not decide.
        weight = max(SMOOTHING, 1.0 / self.gains)
        old = gain if self.mean_gain is None else self.mean_gain
        self.mean_gain = old + weight * (gain - old)
        self.mean_square += weight * (gain * gain - self.mean_square)

    @property
    def real_gain(self) -> float | None:
        """The mean gain, with tokens and times as they came; None before the first."""
        if self.mean_gain is None:
            return None
        rate = (1.0 + self.mean_gain) * self.foregone.correction
        if self.fixed.ratio is not None and self.planned.ratio is not None:
            rate *= self.fixed.ratio / self.planned.ratio
        return rate - 1.0

    def pays(self, cost_noise: float) -> bool | None:
        """Whether the gain is above its noise; None: not known well enough."""
        gain = self.real_gain
        if self.mean_gain is None or gain is None or self.gains < _PLANS_TO_JUDGE:
            return None
        variance = max(0.0, self.mean_square - self.mean_gain**2)
        error = math.sqrt(variance / min(self.gains, 1.0 / SMOOTHING))
        error = math.hypot(error, self.foregone.error)
        if self.planned.ratio is not None:
            error = math.hypot(error, self.fixed.error, self.planned.error)
        return gain > max(cost_noise, error)

    def give_up(self) -> None:
        """Time fixed rounds again if it is long ago; else make no plans for a while."""
        if self.num_carried_out >= _PLANS_OF_STALENESS and self.fixed.ratio is not None:
            # Sequences have grown since, and rounds of both kinds with them.
            self.num_carried_out, self.num_fixed = 0, STEPS_TO_COMPARE
            return
        self.num_fixed, self.gains, self.num_carried_out = self.num_rests, 0, 0
        if self.planned.ratio is not None:
            # It was carried out and lost: each further try may cost as much.
            self.num_rests = min(2 * self.num_rests, _MOST_STEPS_TO_REST)
        self.planned = RoundTimes()
        self.chosen.clear()

    def carry_out(self) -> None:
        """Count a plan that is carried out; now and then the fixed length is timed again."""
        self.num_carried_out += 1
        if self.num_carried_out > _PLANS_PER_COMPARISON and self.fixed.ratio is not None:
            self.num_carried_out, self.num_fixed = 0, STEPS_TO_COMPARE
            self.num_rests = _STEPS_TO_REST

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
