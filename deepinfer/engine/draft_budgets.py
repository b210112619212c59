"""Budgets of decode steps from what is committed, and what came of them.

choose(N)      before step N is built: survivals of rounds that step N does not decide about
committed(N)   before step N is committed: its metrics; survivals of the drafts after it
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from deepinfer.device.runtime import StepKind
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata
from deepinfer.speculation.budget import Survival
from deepinfer.speculation.metrics import SpeculationMetrics
from deepinfer.speculation.planner import PlanMode, Scheduling, VerifyPlanner
from deepinfer.speculation.survival_history import SurvivalHistory

DomainOf = Callable[[str], str | None]
"""Domain of a request by its id, for the metrics."""


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
        self._history = SurvivalHistory(max_num_seqs, max_drafts)
        self.metrics = SpeculationMetrics(max_drafts)

    def choose(self, scheduled: SchedulerOutputs) -> int | None:
        """Drafts of a decode step for the device to deal out; None: all that there are.

        Args:
            scheduled: the step, already counted among its sequences' samples in flight.
        """
        sequences, planner = scheduled.sequences, self._planner
        if planner is None or scheduled.kind is not StepKind.DECODE:
            return None
        slots = [metadata.slot for metadata in sequences]
        owners = [_owner(metadata) for metadata in sequences]
        if planner.scheduling is Scheduling.SYNCHRONOUS:
            survival = self._history.newest(slots, owners)
        else:
            # More than this step in flight: an earlier one drafts what this one verifies.
            anew = [metadata.sequence.num_inflight_samples > 1 for metadata in sequences]
            survival = self._history.lawful(slots, owners, anew)
        bounds = np.array([metadata.query_len - 1 for metadata in sequences])
        survival[np.arange(survival.shape[1]) >= bounds[:, None]] = 0.0
        budget = planner.plan(len(sequences), survival)
        if budget.mode is PlanMode.FIXED:
            return None
        return budget.num_drafts

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
        sampling = [metadata for metadata in scheduled.sequences if metadata.samples]
        # Whoever was preempted or ended since is another owner, or none.
        rows = [row for row, metadata in enumerate(sampling) if metadata.is_current]
        current = [sampling[row] for row in rows]
        slots = [metadata.slot for metadata in current]
        owners = [_owner(metadata) for metadata in current]
        if scheduled.kind is StepKind.DECODE:
            self.metrics.add_step(
                [metadata.query_len - 1 for metadata in current],
                num_verified[rows].tolist(),
                num_accepted[rows].tolist(),
                survival=self._history.newest(slots, owners, unknown=float("nan")),
                domains=self._domains(current),
                is_planned=scheduled.draft_budget is not None,
            )
        self._history.put(slots, owners, survival[rows])

    def _domains(self, sequences: Sequence[SequenceMetadata]) -> list[str | None] | None:
        domain_of = self._domain_of
        if domain_of is None:
            return None
        return [domain_of(metadata.sequence.request.request_id) for metadata in sequences]


def _owner(metadata: SequenceMetadata) -> Hashable:
    """Tells sequences apart, and each from itself before a preemption."""
    sequence = metadata.sequence
    return sequence.request.arrival, sequence.index, metadata.generation
