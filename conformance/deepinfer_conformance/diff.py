"""What changed between two reports."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_conformance.outcome import Outcome
from deepinfer_conformance.suite_report import SuiteReport

# An error has to grow by this factor, and reach this share of its bound, to be worth a line.
_GROWTH = 2.0
_NOTABLE_RATIO = 0.1


@dataclass(frozen=True, slots=True)
class CaseChange:
    """One case that is not what it was.

    Attributes:
        case_id: the case.
        before: status and worst error over bound in words; `-` when it was not run.
        after: the same for the second report.
        is_worse: it counts against the second report.
    """

    case_id: str
    before: str
    after: str
    is_worse: bool


def _words(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    worst = outcome.worst
    return outcome.status.value + ("" if worst is None else f" ({worst.ratio:.3g} of the bound)")


def diff_reports(before: SuiteReport, after: SuiteReport) -> list[CaseChange]:
    """Cases whose status differs or whose error grew notably, in the order of the second report."""
    left = {outcome.case_id: outcome for outcome in before.outcomes}
    right = {outcome.case_id: outcome for outcome in after.outcomes}
    changes = []
    for case_id in [*right, *(case_id for case_id in left if case_id not in right)]:
        old, new = left.get(case_id), right.get(case_id)
        if old is None or new is None:
            changes.append(CaseChange(case_id, _words(old), _words(new), False))
        elif old.status is not new.status or _grew(old, new):
            changes.append(CaseChange(case_id, _words(old), _words(new), new.status.is_bad))
    return changes


def _grew(old: Outcome, new: Outcome) -> bool:
    if old.worst is None or new.worst is None:
        return False
    notable = new.worst.ratio > max(_NOTABLE_RATIO, _GROWTH * old.worst.ratio)
    return notable and new.worst.error != old.worst.error
