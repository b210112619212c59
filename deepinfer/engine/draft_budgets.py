"""Budgets of decode steps from what is committed, and what came of them.

choose(N)      before step N is built: survivals of rounds that step N does not decide about
committed(N)   before step N is committed: its metrics; survivals of the drafts after it
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from deepinfer.device.runtime import StepKind
from deepinfer.engine.round_watch import RoundWatch
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata
from deepinfer.speculation.budget import Survival
from deepinfer.speculation.metrics import SpeculationMetrics
from deepinfer.speculation.planner import PlanMode, Scheduling, VerifyPlanner
from deepinfer.speculation.round_times import RoundKind
from deepinfer.speculation.survival_history import SurvivalHistory

_T = TypeVar("_T")

DomainOf = Callable[[str], str | None]
"""Domain of a request by its id, for the metrics."""


class _Decision(NamedTuple):
    """About a decode step: what plans had to do with it, and K of one that is not carried out."""

    kind: RoundKind
    foregone: int | None


class DraftBudgets:
    """One rank's planner with the survivals that it may look at.

    Attributes:
        metrics: of the run.
    """

    def __init__(
        self,
        planner: VerifyPlanner | None,
        *,
        max_num_seqs: int,
        max_drafts: int,
        domain_of: DomainOf | None = None,
    ) -> None:
        """Nothing known of any request.

        Args:
            planner: None verifies every draft, and counts.
            max_num_seqs: slots.
            max_drafts: D drafts of a request.
            domain_of: None: metrics know no domains.
        """
        self._planner, self._domain_of = planner, domain_of
        self._max_drafts = max_drafts
        self._history = SurvivalHistory(max_num_seqs, max_drafts)
        # By slot: whose domain it is, and the domain.
        self._domains: list[tuple[Hashable, str | None]] = [(None, None)] * max_num_seqs
        # Of each step in flight.
        self._decisions: dict[int, _Decision] = {}
        self._watch = None if planner is None else RoundWatch(planner.clock_us)
        self._is_watching = False
        self.metrics = SpeculationMetrics(max_drafts)

    def choose(self, scheduled: SchedulerOutputs) -> int | None:
        """Drafts of a decode step for the device to deal out; None: all that there are.

        Args:
            scheduled: the step, already counted among its sequences' samples in flight.
        """
        sequences, planner = scheduled.sequences, self._planner
        if planner is None or scheduled.kind is not StepKind.DECODE:
            return None
        is_wanted = planner.wants_survival(len(sequences))
        survival = self._survival(sequences, planner.scheduling) if is_wanted else None
        budget = planner.plan(len(sequences), survival)
        self._decisions[scheduled.step] = _Decision(planner.kind, planner.foregone)
        if budget.mode is PlanMode.FIXED:
            return None
        return budget.num_drafts

    def _survival(self, sequences: Sequence[SequenceMetadata], scheduling: Scheduling) -> Survival:
        """[N, D] fp32 that a plan for these sequences may look at; 0 beyond their bounds."""
        slots, owners = [metadata.slot for metadata in sequences], _owners(sequences)
        if scheduling is Scheduling.SYNCHRONOUS:
            survival = self._history.newest(slots, owners)
        else:
            # More than this step in flight: an earlier one drafts what this one verifies.
            anew = [metadata.sequence.num_inflight_samples > 1 for metadata in sequences]
            survival = self._history.lawful(slots, owners, anew)
        query_lens = [metadata.query_len for metadata in sequences]
        if min(query_lens) <= self._max_drafts:
            bounds = np.array(query_lens)[:, None] - 1
            survival[np.arange(self._max_drafts) >= bounds] = 0.0
        return survival

    def wait(self, collect: Callable[[], _T]) -> _T:
        """Call something that waits for the device; the planner is not told that time as work."""
        if self._watch is None or not self._is_watching:
            return collect()
        return self._watch.wait(collect)

    def committed(
        self,
        scheduled: SchedulerOutputs,
        num_verified: npt.NDArray[np.int64],
        num_accepted: npt.NDArray[np.int64],
        survival: Survival,
    ) -> None:
        """Count a step that is about to be committed; keep what it says about the next drafts.

        Args:
            scheduled: the step.
            num_verified: [N] drafts verified of each request that sampled.
            num_accepted: [N] drafts accepted.
            survival: [N, D] fp32 of the drafts made after the step; 0 where there are none.
        """
        decision = self._decision(scheduled.step)
        if self._planner is not None and self._watch is not None:
            is_decode = scheduled.kind is StepKind.DECODE
            kind = decision.kind if is_decode else None
            self._time(scheduled, kind, self._planner, self._watch)
        current: Sequence[SequenceMetadata] = scheduled.sequences
        if scheduled.kind is not StepKind.DECODE:
            current = [metadata for metadata in current if metadata.samples]
        is_current = [metadata.generation == metadata.sequence.generation for metadata in current]
        if not all(is_current):
            # Whoever was preempted or ended since is another owner, or none.
            rows = np.flatnonzero(is_current).tolist()
            current = [current[row] for row in rows]
            num_verified, num_accepted = num_verified[rows], num_accepted[rows]
            survival = survival[rows]
        slots, owners = [metadata.slot for metadata in current], _owners(current)
        if scheduled.kind is StepKind.DECODE:
            verified = self._history.newest(slots, owners, unknown=float("nan"))
            if decision.foregone is not None:
                self._tell_outcome(scheduled, decision.foregone, num_accepted, verified)
            self.metrics.add_step(
                [metadata.query_len - 1 for metadata in current],
                num_verified,
                num_accepted,
                survival=verified,
                domains=self._domains_of(current, slots, owners),
                is_planned=scheduled.draft_budget is not None,
            )
        self._history.put(slots, owners, survival)

    def _decision(self, step: int) -> _Decision:
        """What was decided about a step that is committed; forget it and those taken back."""
        decision = self._decisions.get(step, _Decision(RoundKind.WATCHED, None))
        self._decisions = {later: each for later, each in self._decisions.items() if later > step}
        return decision

    def _time(
        self,
        scheduled: SchedulerOutputs,
        kind: RoundKind | None,
        planner: VerifyPlanner,
        watch: RoundWatch,
    ) -> None:
        """Time a step; its kind is None if it is no decode step."""
        if kind is not None:
            self._is_watching = planner.wants_round(len(scheduled.sequences))
        if not self._is_watching:
            watch.pause()
            return
        ended = watch.committed(scheduled, kind)
        if ended is not None:
            planner.add_round(ended)

    def _tell_outcome(
        self,
        scheduled: SchedulerOutputs,
        num_drafts: int,
        num_accepted: npt.NDArray[np.int64],
        survival: Survival,
    ) -> None:
        """Tell the planner what came where its plan was not carried out."""
        if self._planner is None:
            return
        is_whole = len(survival) == len(scheduled.sequences) and not np.isnan(survival).any()
        if is_whole and min(m.query_len for m in scheduled.sequences) > self._max_drafts:
            self._planner.add_outcome(num_drafts, survival, num_accepted)

    def _domains_of(
        self,
        sequences: Sequence[SequenceMetadata],
        slots: Sequence[int],
        owners: list[Hashable],
    ) -> list[str | None] | None:
        domain_of = self._domain_of
        if domain_of is None:
            return None
        domains: list[str | None] = []
        for metadata, slot, owner in zip(sequences, slots, owners, strict=True):
            known, domain = self._domains[slot]
            if known != owner:
                domain = domain_of(metadata.sequence.request.request_id)
                self._domains[slot] = owner, domain
            domains.append(domain)
        return domains


def _owners(sequences: Sequence[SequenceMetadata]) -> list[Hashable]:
    """Tell sequences apart, and each from itself before a preemption."""
    return [(metadata.sequence, metadata.generation) for metadata in sequences]
