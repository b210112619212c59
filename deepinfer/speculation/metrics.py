"""What speculation did in a run: drafted, verified, accepted by place; calibration; budgets.

Fed once a step, when it is committed. Sums only: a night's run takes as much memory as a minute's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from deepinfer.speculation.budget import Survival

NUM_BINS = 15
_MOST_SPANS = 512

Counts = npt.NDArray[np.int64]


class Places:
    """Counts by place in the block, over requests and steps.

    Attributes:
        num_rounds: verifications of a request, with drafts or without.
        drafted: [D] drafts made.
        verified: [D] of them verified.
        reached: [D] verified, and all before them accepted.
        accepted: [D] accepted.
    """

    def __init__(self, max_drafts: int) -> None:
        self.num_rounds = 0
        self.drafted, self.verified, self.reached, self.accepted = np.zeros(
            (4, max_drafts), dtype=np.int64
        )

    def add(self, drafted: Counts, verified: Counts, accepted: Counts) -> None:
        """Add rounds: [N] each, drafts of a request that were made, verified, accepted."""
        places = np.arange(len(self.drafted))
        self.num_rounds += len(drafted)
        self.drafted += (drafted[:, None] > places).sum(axis=0)
        self.verified += (verified[:, None] > places).sum(axis=0)
        self.reached += _reached(verified, accepted, places).sum(axis=0)
        self.accepted += (accepted[:, None] > places).sum(axis=0)

    @property
    def conditional(self) -> list[float | None]:
        """[D] share accepted of those reached; None where none was."""
        return [
            float(accepted / reached) if reached else None
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
        ]

    def figures(self) -> dict[str, object]:
        """Everything, for a report; `per_round` are means."""
        rounds = max(1, self.num_rounds)
        return {
            "num_rounds": self.num_rounds,
            "drafted": self.drafted.tolist(),
            "verified": self.verified.tolist(),
            "accepted": self.accepted.tolist(),
            "conditional_acceptance": self.conditional,
            "per_round": {
                "drafted": float(self.drafted.sum() / rounds),
                "verified": float(self.verified.sum() / rounds),
                "accepted": float(self.accepted.sum() / rounds),
            },
        }


class Calibration:
    """Confidences in bins of equal width beside what came of them.

    Only drafts that were reached are counted, one by one: a confidence says how likely its draft
    is accepted if all before it are, and of a trimmed draft nobody knows.

    Attributes:
        count: [D, 15] drafts.
        confidence: [D, 15] sum of their confidences.
        accepted: [D, 15] accepted ones.
    """

    def __init__(self, max_drafts: int) -> None:
        shape = (max_drafts, NUM_BINS)
        self.count = np.zeros(shape, dtype=np.int64)
        self.accepted = np.zeros(shape, dtype=np.int64)
        self.confidence = np.zeros(shape)

    def add(self, survival: Survival, verified: Counts, accepted: Counts) -> None:
        """Add rounds: survivals [N, D] fp32, NaN if unknown; verified and accepted drafts [N]."""
        places = np.arange(survival.shape[1])
        before = np.concatenate((np.ones_like(survival[:, :1]), survival[:, :-1]), axis=1)
        judged = _reached(verified, accepted, places) & (before > 0.0) & ~np.isnan(survival)
        rows, columns = np.nonzero(judged)
        confidence = survival[rows, columns] / before[rows, columns]
        bins = np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        np.add.at(self.count, (columns, bins), 1)
        np.add.at(self.confidence, (columns, bins), confidence)
        np.add.at(self.accepted, (columns, bins), accepted[rows] > columns)

    def error(self, place: int | None = None) -> float | None:
        """Expected calibration error of a place, or of all; None when nothing was counted."""
        chosen = slice(None) if place is None else slice(place, place + 1)
        count, confidence, accepted = (
            values[chosen].sum(axis=0) for values in (self.count, self.confidence, self.accepted)
        )
        return float(np.abs(confidence - accepted).sum() / count.sum()) if count.sum() else None

    def reliability(self) -> list[tuple[float, float, int]]:
        """Mean confidence, share accepted and count of every bin that is not empty."""
        count, confidence, accepted = (
            values.sum(axis=0) for values in (self.count, self.confidence, self.accepted)
        )
        return [
            (float(confidence[i] / count[i]), float(accepted[i] / count[i]), int(count[i]))
            for i in range(NUM_BINS)
            if count[i]
        ]

    def figures(self) -> dict[str, object]:
        """Errors and bins, for a report."""
        return {
            "error": self.error(),
            "error_by_place": [self.error(place) for place in range(len(self.count))],
            "reliability": [
                {"confidence": confidence, "accepted": accepted, "count": count}
                for confidence, accepted, count in self.reliability()
            ],
        }


@dataclass(slots=True)
class BudgetSpan:
    """Steps in a row and their sums.

    Attributes:
        num_steps: steps.
        num_requests: requests that sampled.
        num_verified: drafts verified.
        num_accepted: drafts accepted.
        num_planned: steps whose budget the planner chose.
    """

    num_steps: int = 0
    num_requests: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_planned: int = 0

    def add(self, other: BudgetSpan) -> None:
        self.num_steps += other.num_steps
        self.num_requests += other.num_requests
        self.num_verified += other.num_verified
        self.num_accepted += other.num_accepted
        self.num_planned += other.num_planned


class SpeculationMetrics:
    """Figures of a run.

    Attributes:
        places: of all requests.
        domains: the same by domain, for requests that name one.
        calibration: of confidences, as far as they were given.
        spans: budgets over time; spans grow, so that there are never more than 512.
    """

    def __init__(self, max_drafts: int) -> None:
        """Nothing counted yet.

        Args:
            max_drafts: D drafts of a request.
        """
        self._max_drafts = max_drafts
        self.places, self.calibration = Places(max_drafts), Calibration(max_drafts)
        self.domains: dict[str, Places] = {}
        self.spans: list[BudgetSpan] = []
        self._steps_per_span = 1

    def add_step(
        self,
        num_drafted: Sequence[int],
        num_verified: Sequence[int],
        num_accepted: Sequence[int],
        *,
        survival: Survival | None = None,
        domains: Sequence[str | None] | None = None,
        is_planned: bool = False,
    ) -> None:
        """Count a committed decode step.

        Args:
            num_drafted: [N] drafts that each request had.
            num_verified: [N] drafts that the step verified.
            num_accepted: [N] drafts that were accepted.
            survival: [N, D] fp32 survivals of these drafts, or None.
            domains: what each request is about; None where nothing is known.
            is_planned: whether the planner chose the budget.
        """
        drafted, verified, accepted = (
            np.asarray(values, dtype=np.int64)
            for values in (num_drafted, num_verified, num_accepted)
        )
        self.places.add(drafted, verified, accepted)
        if survival is not None:
            self.calibration.add(survival, verified, accepted)
        if domains is not None:
            for name in {name for name in domains if name is not None}:
                rows = np.array([domain == name for domain in domains])
                of_domain = self.domains.setdefault(name, Places(self._max_drafts))
                of_domain.add(drafted[rows], verified[rows], accepted[rows])
        step = BudgetSpan(
            1, len(drafted), int(verified.sum()), int(accepted.sum()), int(is_planned)
        )
        self._add_span(step)

    def _add_span(self, step: BudgetSpan) -> None:
        if self.spans and self.spans[-1].num_steps < self._steps_per_span:
            self.spans[-1].add(step)
            return
        if len(self.spans) == _MOST_SPANS:
            for first, second in zip(self.spans[::2], self.spans[1::2], strict=True):
                first.add(second)
            del self.spans[1::2]
            self._steps_per_span *= 2
        self.spans.append(step)

    def figures(self) -> dict[str, object]:
        """Everything, for a report."""
        return {
            "all": self.places.figures(),
            "domains": {name: self.domains[name].figures() for name in sorted(self.domains)},
            "calibration": self.calibration.figures(),
            # Columns, one entry for each span: a long run has hundreds.
            "budget": {
                field.name: [getattr(span, field.name) for span in self.spans]
                for field in fields(BudgetSpan)
            },
        }


def _reached(verified: Counts, accepted: Counts, places: Counts) -> npt.NDArray[np.bool_]:
    """[N, D] whether a draft was verified and all before it were accepted."""
    reached: npt.NDArray[np.bool_] = (verified[:, None] > places) & (accepted[:, None] >= places)
    return reached
