"""Running the suite: every case to its end, whatever the others did."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepinfer.device.errors import CapabilityError
from deepinfer_conformance.expected import ExpectedFailure, judged, unused
from deepinfer_conformance.isolation import Executor
from deepinfer_conformance.outcome import Outcome, Status
from deepinfer_conformance.suite import CORE, Level, SuiteCase, suite_cases
from deepinfer_conformance.suite_report import SuiteReport, environment_facts


@dataclass(frozen=True, slots=True)
class Selection:
    """What to run.

    Attributes:
        backend: name of the backend under test.
        options: its options, as the configuration gives them.
        level: how much.
        query: prefix or pattern of case ids; empty takes all.
    """

    backend: str
    options: Mapping[str, object]
    level: Level = Level.DEFAULT
    query: str = ""


def selected_cases(selection: Selection) -> tuple[SuiteCase, ...]:
    """Cases of a selection.

    The reference has none with real shapes: its truth are plain loops, which would take days.
    """
    level = (
        min(selection.level, Level.DEFAULT) if selection.backend == "reference" else selection.level
    )
    return suite_cases(level, selection.query)


def run_suite(
    selection: Selection,
    executor: Executor,
    *,
    expected: tuple[ExpectedFailure, ...] = (),
    cases: tuple[SuiteCase, ...] | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> SuiteReport:
    """Run every selected case.

    Args:
        selection: what to run.
        executor: how; it is not closed.
        expected: failures that the backend's authors know of.
        cases: the cases, if the caller has them; None: those that the selection names.
        on_outcome: told every outcome at once.
    Raises:
        CapabilityError: the backend cannot be created here.
    """
    start = time.perf_counter()
    greeting = executor.greet()
    if greeting.refusal:
        raise CapabilityError(f"backend {selection.backend} cannot be tested: {greeting.refusal}")
    if cases is None:
        cases = selected_cases(selection)
    outcomes = []
    for case in cases:
        if case.profile != CORE and case.profile not in greeting.features:
            outcome = Outcome(case.case_id, case.profile, Status.ABSENT)
        else:
            outcome = judged(executor.run(case), expected)
        outcomes.append(outcome)
        on_outcome(outcome)
    problems = []
    if not selection.query:
        known = tuple(case.case_id for case in suite_cases())
        problems = [
            f"expected failure {entry.cases!r} ({entry.reason}) matches no case; remove the entry"
            for entry in unused(expected, known)
        ]
    return SuiteReport(
        backend=selection.backend,
        options=selection.options,
        device=greeting.device,
        labels=greeting.labels,
        level=selection.level.name.lower(),
        query=selection.query,
        outcomes=tuple(outcomes),
        problems=tuple(problems),
        environment=environment_facts(),
        seconds=time.perf_counter() - start,
    )
