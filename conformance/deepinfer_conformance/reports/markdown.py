"""The report as Markdown: verdicts, first differences, failures with commands, worst errors."""

from __future__ import annotations

import math
from collections.abc import Iterator

from deepinfer_conformance.outcome import Outcome, Status
from deepinfer_conformance.suite_report import SuiteReport


def markdown(report: SuiteReport) -> str:
    """The whole report."""
    return "\n".join(_lines(report)) + "\n"


def number(value: float) -> str:
    """Three digits, or a sign for infinity."""
    return "inf" if math.isinf(value) else f"{value:.3g}"


def counts(report: SuiteReport) -> str:
    """For example `1400 passed, 3 failed`."""
    return ", ".join(
        f"{report.count(status)} {status.value.replace('_', ' ')}"
        for status in Status
        if report.count(status)
    )


def worst_of(outcomes: list[Outcome]) -> Outcome | None:
    """The outcome nearest to its bound, or farthest beyond."""
    measured = [outcome for outcome in outcomes if outcome.worst is not None]
    return max(
        measured, key=lambda outcome: outcome.worst.ratio if outcome.worst else 0.0, default=None
    )


def _lines(report: SuiteReport) -> Iterator[str]:
    yield f"# Conformance of `{report.backend}`"
    yield ""
    labels = f" ({', '.join(report.labels)})" if report.labels else ""
    yield (
        f"Device `{report.device}`{labels}, level {report.level}, {report.seconds:.0f} s: "
        f"{counts(report)}."
    )
    yield ""
    yield "| profile | verdict |"
    yield "|---|---|"
    for name, verdict in report.profiles.items():
        yield f"| {name} | {verdict.value} |"
    for problem in report.problems:
        yield ""
        yield f"**{problem}**"
    if report.missing_ops:
        yield ""
        yield f"Missing ops ({len(report.missing_ops)}): " + ", ".join(
            f"`{op}`" for op in report.missing_ops
        )
    if report.failures:
        yield ""
        yield "## Failures"
        for outcome in report.failures:
            yield ""
            yield f"### `{outcome.case_id}`: {outcome.status.value}"
            yield ""
            if outcome.first_difference:
                yield f"First difference: **{outcome.first_difference}**"
                yield ""
            yield outcome.message
            for note in outcome.notes:
                yield ""
                yield note
            yield ""
            yield f"    {report.repeat_command(outcome)}"
    expected = [o for o in report.outcomes if o.status is Status.EXPECTED_FAILURE]
    if expected:
        yield ""
        yield "## Expected failures"
        yield ""
        yield "| case | reason |"
        yield "|---|---|"
        for outcome in expected:
            yield f"| `{outcome.case_id}` | {outcome.message} |"
    yield ""
    yield "## Worst error per op and scenario"
    yield ""
    yield "| | cases | worst error | bound | in case | output | where | origin of the bound |"
    yield "|---|---|---|---|---|---|---|---|"
    for group, outcomes in report.by_group().items():
        worst = worst_of(outcomes)
        if worst is None or worst.worst is None:
            yield f"| {group} | {len(outcomes)} | | | | | | |"
            continue
        measure = worst.worst
        sample = worst.case_id.partition(":")[2]
        yield (
            f"| {group} | {len(outcomes)} | {number(measure.error)} | {number(measure.bound)} "
            f"| {sample} | {measure.output} | {measure.where} | {measure.origin} |"
        )
    yield ""
    yield "## Environment"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in report.environment.items():
        yield f"| {name} | {value} |"
