"""`deepinfer conformance`: run the suite on a backend, or compare two reports."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from deepinfer.device.errors import ConfigError
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.cases import matches
from deepinfer_conformance.diff import diff_reports
from deepinfer_conformance.expected import expected_failures
from deepinfer_conformance.isolation import Executor, InProcess, Isolated
from deepinfer_conformance.outcome import Outcome, Status
from deepinfer_conformance.reports import read_report, write_reports
from deepinfer_conformance.reports.markdown import counts
from deepinfer_conformance.suite import Level, SuiteCase, suite_cases
from deepinfer_conformance.suite_report import ProfileVerdict, SuiteReport
from deepinfer_conformance.suite_run import Selection, run_suite, selected_cases

_EPILOG = """\
A query is a prefix or a pattern of case ids; --list shows them. Exit code 1: something failed
that was not expected to. The reference is compared with plain float64 loops, every other backend
with the reference on the CPU, on bit-identical inputs.

examples:
  deepinfer conformance --backend reference --quick
  deepinfer conformance --backend mychip --report build/conformance
  deepinfer conformance --backend mychip 'ops/moe/'
  deepinfer conformance diff build/before build/after
"""
_SHOWN_FAILURES = 12


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's parser."""
    parser = subparsers.add_parser(
        "conformance",
        help="check a backend's ops and generations against the reference",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("query", nargs="*", help="case ids to run, or: diff BEFORE AFTER")
    parser.add_argument("--backend", default="reference", help="backend under test")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="backend.options.NAME=VALUE",
        help="an option of the backend",
    )
    level = parser.add_mutually_exclusive_group()
    level.add_argument(
        "--quick", action="store_const", dest="level", const=Level.QUICK, help="under a minute"
    )
    level.add_argument(
        "--full", action="store_const", dest="level", const=Level.FULL, help="real shapes too"
    )
    parser.set_defaults(level=Level.DEFAULT)
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="write JSON, Markdown, JUnit, HTML"
    )
    parser.add_argument("--list", action="store_true", help="show the case ids and end")
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="for each case (default: 120, scenarios 600)",
    )
    parser.add_argument(
        "--in-process", action="store_true", help="no child process, no time limits: for debuggers"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 when nothing failed unexpectedly."""
    if args.query[:1] == ["diff"]:
        return _diff(args.query[1:])
    if args.time_limit is not None and not args.time_limit > 0:
        raise ConfigError(f"--time-limit {args.time_limit}: expected seconds above 0")
    queries: list[str] = args.query
    everything = Selection(args.backend, _options(args.set), args.level)
    cases = suite_cases(args.level) if args.list else selected_cases(everything)
    unmatched = [q for q in queries if not any(matches(case.case_id, q) for case in cases)]
    if queries:
        cases = tuple(c for c in cases if any(matches(c.case_id, query) for query in queries))
    selection = replace(everything, query=" ".join(queries))
    if unmatched:
        raise ConfigError(
            f"query {unmatched[0]!r} selects no case at level {args.level.name.lower()}; "
            "deepinfer conformance --list shows the ids"
        )
    if args.list:
        sys.stdout.write("".join(f"{case.case_id}\n" for case in cases))
        return 0
    executor: Executor = (
        InProcess(Bench(selection.backend, selection.options))
        if args.in_process
        else Isolated(selection.backend, selection.options, limit_s=args.time_limit)
    )
    console = Console(stderr=True)
    try:
        report = _run_with_progress(selection, executor, cases, console)
    finally:
        executor.close()
    _show(report, console)
    if args.report is not None:
        for path in write_reports(report, args.report):
            console.print(f"wrote {path}", highlight=False)
    return 0 if report.is_good else 1


def _options(assignments: list[str]) -> dict[str, object]:
    options: dict[str, object] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        name = path.removeprefix("backend.options.")
        if not equals or name == path or not name:
            raise ConfigError(f"--set {assignment}: expected backend.options.NAME=VALUE")
        options[name] = {"true": True, "false": False}.get(text.lower(), text)
    return options


def _run_with_progress(
    selection: Selection, executor: Executor, cases: tuple[SuiteCase, ...], console: Console
) -> SuiteReport:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{selection.backend}", total=len(cases))
        num_bad = 0

        def on_outcome(outcome: Outcome) -> None:
            nonlocal num_bad
            if outcome.status.is_bad:
                num_bad += 1
            if outcome.status.is_bad and outcome.status is not Status.MISSING:
                if outcome.first_difference:
                    console.print(f"[red]first difference[/red] {escape(outcome.first_difference)}")
                if num_bad <= _SHOWN_FAILURES:  # the summary shows the rest
                    console.print(f"[red]{outcome.status.value}[/red] {escape(outcome.case_id)}")
            progress.update(
                task,
                advance=1,
                description=f"{outcome.group}" + (f" [red]{num_bad} bad" if num_bad else ""),
            )

        return run_suite(
            selection,
            executor,
            expected=expected_failures(selection.backend),
            cases=cases,
            on_outcome=on_outcome,
        )


def _show(report: SuiteReport, console: Console) -> None:
    for outcome in report.failures[:_SHOWN_FAILURES]:
        console.print()
        if outcome.first_difference:
            console.print(f"first difference: {outcome.first_difference}", markup=False)
        console.print(f"{outcome.case_id}: {outcome.message}", markup=False)
        for note in outcome.notes:
            console.print(note, markup=False)
        console.print(f"  repeat: {report.repeat_command(outcome)}", markup=False, soft_wrap=True)
    hidden = len(report.failures) - _SHOWN_FAILURES
    if hidden > 0:
        console.print(f"... and {hidden} more; --report DIR writes them all")
    if report.missing_ops:
        console.print(
            f"\n{len(report.missing_ops)} ops are missing: {', '.join(report.missing_ops)}"
        )
    for problem in report.problems:
        console.print(problem, markup=False)
    labels = f" ({', '.join(report.labels)})" if report.labels else ""
    table = Table(title=f"{report.backend} on {report.device}{labels}: {counts(report)}")
    table.add_column("profile")
    table.add_column("verdict")
    table.add_column("cases", justify="right")
    colours = {ProfileVerdict.PASS: "green", ProfileVerdict.FAIL: "red"}
    for name, verdict in report.profiles.items():
        colour = colours.get(verdict, "yellow")
        cases = sum(outcome.profile == name for outcome in report.outcomes)
        table.add_row(name, f"[{colour}]{verdict.value}[/{colour}]", str(cases))
    Console().print(table)


def _diff(paths: list[str]) -> int:
    if len(paths) != 2:
        raise ConfigError(f"diff {paths}: expected two reports, or the folders that hold them")
    reports = []
    for path in map(Path, paths):
        try:
            reports.append(read_report(path))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path}: no conformance report: {error}") from error
    changes = diff_reports(*reports)
    table = Table(title=f"{len(changes)} of {len(reports[1].outcomes)} cases changed")
    for column in ("case", "before", "after"):
        table.add_column(column, overflow="fold")
    for change in changes:
        colour = "red" if change.is_worse else "green"
        table.add_row(escape(change.case_id), change.before, f"[{colour}]{change.after}[/{colour}]")
    Console().print(table)
    return 1 if any(change.is_worse for change in changes) else 0
