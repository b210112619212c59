"""The planner: how many drafts the next step verifies, and whether planning pays at all.

It is asked once a step, on the host, before the step is launched:

    budget = planner.plan(num_sampling, survival, num_other_rows=0)

Asynchronous (steps in flight): `survival` is that of drafts of an earlier round, computed two
steps before with one step in flight; K is the best over all, and the device admits the K
likeliest of the drafts at hand (op `admit_drafts`). Synchronous (the
host has seen the confidences of the drafts at hand): K is where one more first does not pay.
`budget.py` says why both keep the distribution of outputs. They do so only if drafts of different
rounds are drawn from different random numbers, even where they stand for the same position:
otherwise an old confidence knows a draft that is still to be drawn.

Cost tables say how long the device takes. A round takes at least as long as the host needs for
it, and where the host is the limit every draft is free. So the planner is told how long rounds
took (`add_round`), reckons with the host's part, and compares planned rounds with fixed ones as
they were.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer.device.errors import ConfigError, ContractError
from deepinfer.speculation.budget import (
    Survival,
    best_budget,
    early_stop_budget,
    expected_tokens,
    foreseen_stop_budget,
    lower_envelope,
)
from deepinfer.speculation.cost_tables import CostTables, Times
from deepinfer.speculation.foregone_plans import Outcome
from deepinfer.speculation.plan_record import PLANS_OF_AGE, SMOOTHING, STEPS_TO_TIME, PlanRecord
from deepinfer.speculation.round_times import Round, RoundKind
from deepinfer.speculation.round_turns import RoundTurns


class PlanMode(enum.Enum):
    """What a step verifies: all drafts of every request, or the budget's likeliest ones."""

    FIXED = "fixed"
    DYNAMIC = "dynamic"


class Scheduling(enum.Enum):
    """Which confidences a plan is made from: those of the drafts at hand, or older ones."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"


class PlannedBudget(NamedTuple):
    """The decision for one step.

    Attributes:
        num_drafts: K drafts of the whole batch; in FIXED mode those of all requests.
        mode: DYNAMIC asks the device to admit the K likeliest, FIXED verifies every draft.
    """

    num_drafts: int
    mode: PlanMode


class VerifyPlanner:
    """Chooses budgets for one rank; not thread safe.

    Attributes:
        num_plans: steps for which it looked at confidences.
        foregone: K that the newest decision would have been, where all drafts are verified
            nonetheless; None where it was carried out, or nothing is to be learned from it.
        kind: what the newest decision had to do with plans.
        scheduling: which confidences it wants.
    """

    def __init__(
        self,
        costs: CostTables,
        *,
        max_drafts: int,
        max_num_seqs: int,
        max_rows: int | None = None,
        scheduling: Scheduling = Scheduling.ASYNCHRONOUS,
        falls_back: bool = True,
        overhead_us: float | None = None,
        clock_us: Callable[[], float] | None = None,
    ) -> None:
        """Lay the costs out by rows.

        Args:
            costs: measured times.
            max_drafts: D drafts of a request at most; the fixed length.
            max_num_seqs: most requests of a step.
            max_rows: most rows of a step, for example of the sampler's buffers; None: no limit
                but max_num_seqs * (1 + max_drafts).
            scheduling: which confidences `plan` is given.
            falls_back: whether it uses the fixed length until it is known to gain more than the
                noise of its figures, and plans no more for a while where it does not. If not, it
                reckons with the costs alone, however long rounds take.
            overhead_us: what the device needs for a planned step beside a fixed one; None:
                nothing, and the host the planner's own time, which it measures.
            clock_us: monotonic microseconds; None: this process's.
        Raises:
            ConfigError: a limit is below what one row of every request needs.
        """
        full = max_num_seqs * (1 + max_drafts)
        if max_drafts < 1 or max_num_seqs < 1:
            raise ConfigError(
                f"max_drafts {max_drafts} and max_num_seqs {max_num_seqs} leave nothing to plan; "
                "expected both from 1"
            )
        if max_rows is not None and max_rows < max_num_seqs:
            raise ConfigError(
                f"max_rows {max_rows} is below max_num_seqs {max_num_seqs}, but a step has a row "
                "of every request; raise the first or lower the second"
            )
        self._max_drafts, self._max_num_seqs = max_drafts, max_num_seqs
        self._max_rows = max_rows
        self.scheduling, self._falls_back = scheduling, falls_back
        self._draft_us = costs.draft_times(max_num_seqs)
        self._verify_us = costs.verify_times(full)
        self._costs = costs
        self._noise = costs.relative_noise
        self._records: dict[int, PlanRecord] = {}
        self._given_overhead_us = overhead_us
        self._own_us = 0.0
        self.num_plans = 0
        self.foregone: int | None = None
        self.kind = RoundKind.FIXED
        self._clock_us = clock_us or (lambda: time.perf_counter_ns() / 1000.0)

    @property
    def overhead_us(self) -> float:
        """What a planned step is charged beside a fixed one, until rounds of both are known."""
        return self._own_us if self._given_overhead_us is None else self._given_overhead_us

    @property
    def clock_us(self) -> Callable[[], float]:
        """The clock that rounds are to be timed with."""
        return self._clock_us

    def wants_survival(self, num_sampling: int) -> bool:
        """Whether the next plan for so many requests looks at survivals."""
        if num_sampling == 0:
            return False
        is_limited = self._most_drafts(num_sampling, 0) < num_sampling * self._max_drafts
        return is_limited or not self._record(num_sampling).is_fixed

    def plan(
        self,
        num_sampling: int,
        survival: Survival | None,
        num_other_rows: int = 0,
    ) -> PlannedBudget:
        """The budget of the next step.

        Args:
            num_sampling: R requests that sample in it; only they count as expected tokens.
            survival: [R, D] fp32 running products of confidences, in any order of requests: of
                the drafts at hand (synchronous) or of earlier rounds (asynchronous). 1 where a
                request's are not known yet, 0 where it has no draft. None: none is known.
            num_other_rows: rows of the step that yield no token.
        Raises:
            ContractError: `survival` has another shape, or there are more requests than
                max_num_seqs.
        """
        if not 0 <= num_sampling <= self._max_num_seqs:
            raise ContractError(
                f"{num_sampling} requests sample, max_num_seqs is {self._max_num_seqs}; "
                "make the planner for the scheduler's limit"
            )
        fixed = PlannedBudget(num_sampling * self._max_drafts, PlanMode.FIXED)
        self.foregone, self.kind = None, RoundKind.FIXED
        if num_sampling == 0:
            return fixed
        limit = self._most_drafts(num_sampling, num_other_rows)
        is_limited = limit < fixed.num_drafts
        record = self._record(num_sampling)
        if record.is_fixed and not is_limited:
            self._count_step(record)
            if record.chosen:  # between planned rounds: as the newest of them
                self.foregone = round(record.chosen[-1] * num_sampling)
            return fixed
        if survival is None:
            survival = np.ones((num_sampling, self._max_drafts), dtype=np.float32)
            if not is_limited:
                return fixed
        if survival.shape != (num_sampling, self._max_drafts):
            raise ContractError(
                f"survival has shape {survival.shape}; expected ({num_sampling}, "
                f"{self._max_drafts}): a row for each request that samples"
            )
        # Before this step is looked at: its confidences know drafts that are decided about now.
        is_carried_out = is_limited or not self._falls_back or self._takes_turn(record)
        self.num_plans += 1
        begin = self._clock_us()
        budget = self._choose(survival, num_sampling, num_other_rows, limit, record)
        self._count_own_time(self._clock_us() - begin)
        if not is_carried_out:
            # Until plans are known to pay they are looked at, and not carried out.
            self.foregone, self.kind = budget, RoundKind.WATCHED
            return fixed
        self.kind = RoundKind.PLANNED
        return fixed if budget >= fixed.num_drafts else PlannedBudget(budget, PlanMode.DYNAMIC)

    def _takes_turn(self, record: PlanRecord) -> bool:
        """Whether a plan that is made now is carried out; begins turns of such plans."""
        if record.turns is not None:
            self._count_step(record)
            return True
        pays = record.pays(self._noise)
        if pays:
            record.turns = RoundTurns()
        elif pays is False:
            record.give_up()
        return False

    def _count_step(self, record: PlanRecord) -> None:
        record.count_step(self._noise, partial(self._round_us, record))

    def wants_round(self, num_sampling: int) -> bool:
        """Whether `add_round` counts rounds of so many requests now; early in a rest it does not.

        Without the fall back it reckons with the costs alone.
        """
        if not self._falls_back or num_sampling == 0:
            return False
        return self._record(num_sampling).num_fixed <= STEPS_TO_TIME

    def add_round(self, ended: Round) -> None:
        """Hear how long a round took that this planner decided about, if it wants to know."""
        if not self.wants_round(ended.num_sampling):
            return
        record, is_planned = self._record(ended.num_sampling), ended.kind is RoundKind.PLANNED
        if ended.kind is RoundKind.WATCHED:
            return  # a plan was made in it all the same
        (record.planned_host if is_planned else record.fixed_host).add(ended.host_us)
        if record.turns is not None:
            (device_us,) = self._device_times(ended.num_sampling, ended.num_rows, 0).tolist()
            record.turns.add(device_us, ended.time_us, is_planned=is_planned)

    def add_outcome(
        self, num_drafts: int, survival: Survival, accepted: npt.NDArray[np.int64]
    ) -> None:
        """Hear what came in a round that verified all drafts, though a plan for it was foregone.

        Args:
            num_drafts: the `foregone` of its step.
            survival: [R, D] fp32 of its drafts.
            accepted: [R] drafts accepted.
        """
        self._record(len(survival)).add_outcome(Outcome(num_drafts, survival, accepted))

    def expected_gain(self, num_sampling: int) -> float | None:
        """Mean gain over the fixed length for batches of about this size; None: not known yet."""
        record = self._records.get(num_sampling.bit_length())
        return None if record is None else record.real_gain

    def _record(self, num_sampling: int) -> PlanRecord:
        # Sizes within a factor of two behave alike, and a request more or less is no new start.
        size = num_sampling.bit_length()
        if size not in self._records:
            begins = STEPS_TO_TIME if self._falls_back else 0
            self._records[size] = PlanRecord(num_fixed=begins)
        return self._records[size]

    def _most_drafts(self, num_sampling: int, num_other_rows: int) -> int:
        most = num_sampling * self._max_drafts
        if self._max_rows is None:
            return most
        return max(0, min(most, self._max_rows - num_sampling - num_other_rows))

    def _choose(
        self, survival: Survival, num_sampling: int, num_other_rows: int, limit: int,
        record: PlanRecord,
    ) -> int:  # fmt: skip
        """K by the scheduling in force; what plans are worth goes into the record.

        An asynchronous K was chosen for other drafts than those it admits, and is worth less than
        it promises. So a gain is counted when the survivals come back that the K of two plans
        before was applied to.
        """
        tokens = expected_tokens(survival, num_sampling)
        first_row = num_sampling + num_other_rows
        device_us = self._device_times(num_sampling, first_row, num_sampling * self._max_drafts)
        times = self._rounds(record, device_us, is_planned=True)
        (fixed_us,) = self._rounds(record, device_us[-1:], is_planned=False).tolist()
        shares = times / fixed_us
        times = fixed_us * record.real_time(shares)
        limited = slice(limit + 1)
        if self.scheduling is Scheduling.ASYNCHRONOUS:
            budget = best_budget(tokens[limited], times[limited])
        else:
            foreseen = record.foreseen(tokens)
            if foreseen is None:
                envelope = lower_envelope(times[limited])
                budget = early_stop_budget(tokens[limited], times[limited], envelope)
            else:
                budget = foreseen_stop_budget(tokens[limited], times[limited], foreseen[limited])
            record.add_tokens(tokens)
        judged: int | None = budget.num_drafts
        if self.scheduling is Scheduling.ASYNCHRONOUS:
            full = len(record.chosen) == PLANS_OF_AGE
            judged = round(record.chosen[0] * num_sampling) if full else None
        record.chosen.append(budget.num_drafts / num_sampling)
        if judged is not None:
            record.add_plan(float(tokens[judged] / tokens[-1]), float(shares[judged]))
        return budget.num_drafts

    def _device_times(self, num_sampling: int, first_row: int, num_drafts: int) -> Times:
        """[num_drafts + 1] microseconds that the device needs for a round, by drafts verified."""
        last_row = first_row + num_drafts
        if last_row >= len(self._verify_us):
            self._verify_us = self._costs.verify_times(2 * last_row)
        times: Times = self._verify_us[first_row : last_row + 1] + self._draft_us[num_sampling]
        return times

    def _rounds(self, record: PlanRecord, device_us: Times, *, is_planned: bool) -> Times:
        """Microseconds of rounds whose steps take the device so long, of the shape of those.

        With steps in flight host and device work at once, else by turns.
        """
        host_us = self._host_us(record, is_planned)
        device_us = device_us + self._dealing_us(is_planned)
        if self.scheduling is Scheduling.ASYNCHRONOUS:
            return np.maximum(device_us, host_us)
        return device_us + host_us

    def _round_us(self, record: PlanRecord, device_us: float, is_planned: bool) -> float:
        """The same of one round."""
        host_us = self._host_us(record, is_planned)
        device_us += self._dealing_us(is_planned)
        if self.scheduling is Scheduling.ASYNCHRONOUS:
            return max(device_us, host_us)
        return device_us + host_us

    def _host_us(self, record: PlanRecord, is_planned: bool) -> float:
        host_us = record.fixed_host.median_us or 0.0
        if not is_planned:
            return host_us
        own_us = self._own_us if self._given_overhead_us is None else 0.0
        return record.planned_host.median_us or host_us + own_us

    def _dealing_us(self, is_planned: bool) -> float:
        return (self._given_overhead_us or 0.0) if is_planned else 0.0

    def _count_own_time(self, time_us: float) -> None:
        self._own_us += SMOOTHING * (time_us - self._own_us)
