"""The report as JUnit XML, for CI systems."""

from __future__ import annotations

from xml.etree import ElementTree

from deepinfer_conformance.outcome import Outcome, Status
from deepinfer_conformance.suite_report import SuiteReport

_FAILURES = (Status.FAILED, Status.UNEXPECTED_PASS, Status.MISSING)


def junit_xml(report: SuiteReport) -> str:
    """One test suite, one test case per case; absent features and expected failures are skips."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"deepinfer conformance {report.backend}",
        tests=str(len(report.outcomes)),
        failures=str(
            sum(o.status in (Status.FAILED, Status.UNEXPECTED_PASS) for o in report.outcomes)
        ),
        errors=str(
            sum(o.status in (Status.ERROR, Status.TIMEOUT, Status.CRASHED) for o in report.outcomes)
        ),
        skipped=str(
            sum(o.status in (Status.ABSENT, Status.EXPECTED_FAILURE) for o in report.outcomes)
        ),
        time=f"{report.seconds:.3f}",
        timestamp=report.environment.get("date_utc", ""),
    )
    for outcome in report.outcomes:
        suite.append(_case(outcome, report))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(outcome: Outcome, report: SuiteReport) -> ElementTree.Element:
    group, _, sample = outcome.case_id.partition(":")
    case = ElementTree.Element(
        "testcase", classname=group.replace("/", "."), name=sample, time=f"{outcome.seconds:.4f}"
    )
    if outcome.status in (Status.ABSENT, Status.EXPECTED_FAILURE):
        words = outcome.message or f"{outcome.profile} is not declared"
        ElementTree.SubElement(case, "skipped", message=words)
    elif outcome.status.is_bad:
        failed = outcome.status in _FAILURES
        words = outcome.first_difference or outcome.message
        element = ElementTree.SubElement(case, "failure" if failed else "error", message=words)
        element.text = "\n".join(
            [outcome.message, *outcome.notes, f"repeat: {report.repeat_command(outcome)}"]
        )
    return case
