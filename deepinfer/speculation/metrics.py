"""What speculation did in a run: drafted, verified, accepted by place; calibration; budgets.

Fed once a step, when it is committed. Sums only: a night's run takes as much memory as a minute's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer.speculation.budget import Survival

NUM_BINS = 15
_MOST_SPANS = 512
_STEPS_AT_ONCE = 64
"""Steps that are counted together."""

Counts = npt.NDArray[np.int64]
IntArray = Sequence[int] | Counts


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
        self._counts = np.zeros((4, max_drafts), dtype=np.int64)
        self.drafted, self.verified, self.reached, self.accepted = self._counts

    def add(self, num_rounds: int, counts: Counts) -> None:
        """Add rounds, counted already: [4, D] in the order of the attributes."""
        self.num_rounds += num_rounds
        self._counts += counts

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
        cells = columns * NUM_BINS + bins
        is_accepted = accepted[rows] > columns
        self.count += np.bincount(cells, minlength=self.count.size).reshape(self.count.shape)
        self.accepted += np.bincount(cells[is_accepted], minlength=self.count.size).reshape(
            self.count.shape
        )
        # One by one, so that the sums do not depend on how many rounds are added at once.
        np.add.at(self.confidence.reshape(-1), cells, confidence.astype(np.float64))

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


class _Rounds(NamedTuple):
    """A committed step that is not counted yet; see `SpeculationMetrics.add_step`."""

    drafted: Counts
    verified: Counts
    accepted: Counts
    survival: Survival | None
    domains: Sequence[str | None] | None
    is_planned: bool


class SpeculationMetrics:
    """Figures of a run.

    Steps are counted some dozens at a time, because counting one costs the host nearly as much;
    whoever asks for a figure gets that of all steps.
    """

    def __init__(self, max_drafts: int) -> None:
        """Nothing counted yet.

        Args:
            max_drafts: D drafts of a request.
        """
        self._max_drafts = max_drafts
        self._places, self._calibration = Places(max_drafts), Calibration(max_drafts)
        self._domains: dict[str, Places] = {}
        self._spans: list[BudgetSpan] = []
        self._steps_per_span = 1
        self._waiting: list[_Rounds] = []

    @property
    def places(self) -> Places:
        """Counts of all requests."""
        self._count()
        return self._places

    @property
    def domains(self) -> dict[str, Places]:
        """The same by domain, for requests that name one."""
        self._count()
        return self._domains

    @property
    def calibration(self) -> Calibration:
        """Of confidences, as far as they were given."""
        self._count()
        return self._calibration

    @property
    def spans(self) -> list[BudgetSpan]:
        """Budgets over time; spans grow, so that there are never more than 512."""
        self._count()
        return self._spans

    def add_step(
        self,
        num_drafted: IntArray,
        num_verified: IntArray,
        num_accepted: IntArray,
        *,
        survival: Survival | None = None,
        domains: Sequence[str | None] | None = None,
        is_planned: bool = False,
    ) -> None:
        """Count a committed decode step.

        Args:
            num_drafted: [N] drafts that each request had; copied, as the next two are.
            num_verified: [N] drafts that the step verified.
            num_accepted: [N] drafts that were accepted.
            survival: [N, D] fp32 survivals of these drafts, or None; not changed afterwards.
            domains: what each request is about; None where nothing is known.
            is_planned: whether the planner chose the budget.
        """
        drafted, verified, accepted = (
            np.array(values, dtype=np.int64) for values in (num_drafted, num_verified, num_accepted)
        )
        self._waiting.append(_Rounds(drafted, verified, accepted, survival, domains, is_planned))
        if len(self._waiting) == _STEPS_AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Count the steps that wait."""
        if not self._waiting:
            return
        steps, self._waiting = self._waiting, []
        drafted = np.concatenate([step.drafted for step in steps])
        verified = np.concatenate([step.verified for step in steps])
        accepted = np.concatenate([step.accepted for step in steps])
        names: list[str | None] = []
        for step in steps:
            names += [None] * len(step.drafted) if step.domains is None else step.domains
        self._count_places(drafted, verified, accepted, names)
        known = [step for step in steps if step.survival is not None]
        if known:
            self._calibration.add(
                np.concatenate([step.survival for step in known if step.survival is not None]),
                np.concatenate([step.verified for step in known]),
                np.concatenate([step.accepted for step in known]),
            )
        for step in steps:
            num_verified, num_accepted = int(step.verified.sum()), int(step.accepted.sum())
            self._add_span(
                BudgetSpan(1, len(step.drafted), num_verified, num_accepted, int(step.is_planned))
            )

    def _count_places(
        self, drafted: Counts, verified: Counts, accepted: Counts, names: list[str | None]
    ) -> None:
        """Count [N] rounds of drafts for all requests, and for those of each domain."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        domain = np.fromiter(map(numbers.__getitem__, names), dtype=np.int64, count=len(names))
        size = self._max_drafts + 1
        # A draft is reached if it was verified and at most the last before it was refused.
        kinds = np.stack((drafted, verified, np.minimum(verified, accepted + 1), accepted))
        kinds = kinds.clip(0, self._max_drafts)
        cells = (np.arange(len(kinds))[:, None] * len(numbers) + domain) * size + kinds
        counts = np.bincount(cells.ravel(), minlength=len(kinds) * len(numbers) * size)
        counts = counts.reshape(len(kinds), len(numbers), size)
        # Rounds with more drafts than each place has before it.
        above = counts[:, :, :0:-1].cumsum(axis=2)[:, :, ::-1]
        self._places.add(len(names), above.sum(axis=1))
        for name, number in numbers.items():
            if name is not None:
                of_domain = self._domains.setdefault(name, Places(self._max_drafts))
                of_domain.add(int(counts[0, number].sum()), above[:, number])

    def _add_span(self, step: BudgetSpan) -> None:
        if self._spans and self._spans[-1].num_steps < self._steps_per_span:
            self._spans[-1].add(step)
            return
        if len(self._spans) == _MOST_SPANS:
            for first, second in zip(self._spans[::2], self._spans[1::2], strict=True):
                first.add(second)
            del self._spans[1::2]
            self._steps_per_span *= 2
        self._spans.append(step)

    def figures(self) -> dict[str, object]:
        """Everything, for a report."""
        return {
            "all": self.places.figures(),
            "domains": {name: domain.figures() for name, domain in sorted(self.domains.items())},
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
