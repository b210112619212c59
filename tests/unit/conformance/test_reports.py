"""Reports: what they hold, that JSON reads back, that HTML and XML are well formed."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from deepinfer_conformance.diff import diff_reports
from deepinfer_conformance.outcome import Measure, Outcome, Status
from deepinfer_conformance.reports import read_report, write_reports
from deepinfer_conformance.suite import CORE
from deepinfer_conformance.suite_report import SuiteReport

MakeReport = Callable[..., SuiteReport]


def _measured(ratio: float, status: Status = Status.PASSED) -> Outcome:
    measure = Measure("out", ratio, 1.0, "at [0]", "why", passed=ratio <= 1.0)
    return Outcome("ops/norm/rmsnorm:exact,control", CORE, status, measures=(measure,))


def test_json_reads_back(tmp_path: Path, make_report: MakeReport, failed: Outcome) -> None:
    report = make_report(failed, _measured(0.5))
    write_reports(report, tmp_path / "new" / "folder")
    assert read_report(tmp_path / "new" / "folder") == report


def test_every_report_says_what_is_wrong_and_how_to_repeat_it(
    tmp_path: Path, make_report: MakeReport, failed: Outcome
) -> None:
    for path in write_reports(make_report(failed), tmp_path):
        text = path.read_text(encoding="utf-8")
        assert "prefill step 0, layer 3, op kv/rope_store" in text
        assert "scenarios/greedy" in text
        if path.suffix != ".json":
            assert "deepinfer conformance --backend mychip --set backend.options.emulated=" in text
            assert "emulated" in text


def test_junit_counts(tmp_path: Path, make_report: MakeReport, failed: Outcome) -> None:
    absent = Outcome("features/x:1", "x", Status.ABSENT)
    crashed = Outcome("ops/a/b:1", CORE, Status.CRASHED)
    paths = write_reports(make_report(failed, absent, crashed), tmp_path)
    suite = ElementTree.parse(paths[2]).getroot()[0]
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "3", "failures": "1", "errors": "1", "skipped": "1"}


def test_html_is_balanced_escaped_and_loads_nothing(
    tmp_path: Path, make_report: MakeReport, failed: Outcome
) -> None:
    text = write_reports(make_report(failed), tmp_path)[3].read_text(encoding="utf-8")

    class Balance(HTMLParser):
        open: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not {"src", "href"} & {name for name, _ in attrs}
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            # A table row or cell may be left open, as HTML allows; ours are not.
            assert self.open.pop() == tag

    Balance().feed(text)
    assert Balance.open == []
    assert "prompt 0 &lt;1&gt;" in text
    assert "tokens differ &amp; more" in text


def test_diff_names_new_failures_and_grown_errors(make_report: MakeReport, failed: Outcome) -> None:
    before = make_report(_measured(0.1))
    after = make_report(_measured(0.6), failed)
    grown, new = sorted(diff_reports(before, after), key=lambda change: change.case_id)
    assert (grown.before, grown.after) == (
        "passed (0.1 of the bound)",
        "passed (0.6 of the bound)",
    )
    assert not grown.is_worse
    assert (new.before, new.is_worse) == ("-", False)
    broken = diff_reports(before, make_report(_measured(3.0, Status.FAILED)))
    assert [change.is_worse for change in broken] == [True]


def test_diff_of_equal_reports_is_empty(make_report: MakeReport, failed: Outcome) -> None:
    assert diff_reports(make_report(failed), make_report(failed)) == []
