"""The report as one self-contained HTML page: verdicts, failures, heat map, tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from deepinfer_conformance.outcome import Outcome, Status
from deepinfer_conformance.reports.markdown import counts, number, worst_of
from deepinfer_conformance.suite_report import ProfileVerdict, SuiteReport

_STYLE = """
:root { --ink:#1c2430; --soft:#5b6675; --line:#dde3ea; --page:#f6f8fa; --card:#fff;
  --good:#1a7f4b; --bad:#c0342b; --warn:#9a6700; --none:#8b95a1; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6eaf0; --soft:#9aa6b5; --line:#2d3643;
  --page:#12161c; --card:#1a2029; --good:#3fb97c; --bad:#f0685e; --warn:#d6a23c; } }
* { box-sizing:border-box } body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
main { max-width:1180px; margin:0 auto; padding:32px 24px 64px }
h1 { font-size:26px; margin:0 0 4px } h2 { font-size:18px; margin:36px 0 12px }
.sub { color:var(--soft); margin:0 0 20px }
.cards { display:flex; flex-wrap:wrap; gap:12px }
.card { background:var(--card); border:1px solid var(--line); border-radius:10px;
  padding:12px 18px; min-width:150px; border-left:5px solid var(--none) }
.card b { display:block; font-size:19px } .card span { color:var(--soft); font-size:13px }
.pass { border-left-color:var(--good) } .fail { border-left-color:var(--bad) }
.expected { border-left-color:var(--warn) }
.pass b { color:var(--good) } .fail b { color:var(--bad) } .expected b { color:var(--warn) }
.failure { background:var(--card); border:1px solid var(--line); border-left:5px solid var(--bad);
  border-radius:8px; padding:12px 16px; margin:10px 0 }
.failure p { margin:6px 0; overflow-wrap:anywhere } .first { font-weight:600 }
.note { color:var(--soft); font-size:13px }
code, pre { font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace }
pre { background:var(--page); border:1px solid var(--line); border-radius:6px; padding:8px 10px;
  margin:8px 0 0; white-space:pre-wrap; overflow-wrap:anywhere; user-select:all }
table { border-collapse:collapse; width:100%; background:var(--card);
  border:1px solid var(--line); border-radius:8px; font-size:13px }
th, td { text-align:left; padding:5px 10px; border-top:1px solid var(--line); vertical-align:top }
th { color:var(--soft); font-weight:600; border-top:0 }
td.n { text-align:right; white-space:nowrap }
td.where { overflow-wrap:anywhere; max-width:260px }
td.origin { color:var(--soft); max-width:260px }
.map td { border-top:1px solid var(--line); padding:3px 10px }
.map td.name { white-space:nowrap; width:1% }
.cells { display:flex; flex-wrap:wrap; gap:2px }
.cells i { width:15px; height:15px; border-radius:3px; display:block }
.legend { display:flex; gap:14px; flex-wrap:wrap; color:var(--soft); font-size:13px;
  margin:0 0 10px } .legend i { width:13px; height:13px; border-radius:3px; display:inline-block;
  vertical-align:-2px; margin-right:5px }
.bar { background:var(--line); border-radius:4px; height:8px; width:110px; overflow:hidden }
.bar i { display:block; height:8px; background:var(--good) } .bar i.over { background:var(--bad) }
"""
_SHADES = (
    (0.0, "#cfe8d9", "equal"),
    (0.1, "#9fd3b4", "up to 10 % of the bound"),
    (0.5, "#5bb384", "up to 50 %"),
    (1.0, "#e3b341", "up to the bound"),
)
_BEYOND, _BROKEN, _ABSENT, _EXPECTED = "#d5473c", "#7a1f6b", "#c3cad3", "#b98bd0"
_MISSING = "#39414d"


def html_page(report: SuiteReport) -> str:
    """The page; it loads nothing from anywhere."""
    title = f"Conformance of {report.backend}"
    parts = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>",
        *_head(report, title),
        *_failures(report),
        *_heat_map(report),
        *_table(report),
        *_environment(report),
        "</main></body></html>\n",
    )
    return "\n".join(parts)


def _head(report: SuiteReport, title: str) -> Iterator[str]:
    labels = f" · <b>{escape(', '.join(report.labels))}</b>" if report.labels else ""
    query = f" · query <code>{escape(report.query)}</code>" if report.query else ""
    yield f"<h1>{escape(title)}</h1>"
    yield (
        f"<p class='sub'>device <code>{escape(report.device)}</code>{labels} · level "
        f"{report.level}{query} · {report.seconds:.0f} s · {escape(counts(report))}</p>"
    )
    yield "<div class='cards'>"
    shown = {
        ProfileVerdict.PASS: "pass",
        ProfileVerdict.FAIL: "fail",
        ProfileVerdict.EXPECTED_FAILURES: "expected",
        ProfileVerdict.ABSENT: "absent",
    }
    for name, verdict in report.profiles.items():
        cases = [outcome for outcome in report.outcomes if outcome.profile == name]
        passed = sum(outcome.status is Status.PASSED for outcome in cases)
        yield (
            f"<div class='card {shown[verdict]}'><span>{escape(name)}</span><b>{verdict.value}</b>"
            f"<span>{passed} of {len(cases)} cases</span></div>"
        )
    yield "</div>"
    for problem in report.problems:
        yield f"<div class='failure'><p class='first'>{escape(problem)}</p></div>"
    if report.missing_ops:
        names = ", ".join(f"<code>{escape(op)}</code>" for op in report.missing_ops)
        yield f"<h2>Missing ops ({len(report.missing_ops)})</h2><p>{names}</p>"


def _failures(report: SuiteReport) -> Iterator[str]:
    if not report.failures:
        return
    yield f"<h2>Failures ({len(report.failures)})</h2>"
    for outcome in report.failures:
        yield "<div class='failure'>"
        yield f"<code>{escape(outcome.case_id)}</code> · {outcome.status.value}"
        if outcome.first_difference:
            yield f"<p class='first'>First difference: {escape(outcome.first_difference)}</p>"
        yield f"<p>{escape(outcome.message)}</p>"
        for note in outcome.notes:
            yield f"<p class='note'>{escape(note)}</p>"
        yield f"<pre>{escape(report.repeat_command(outcome))}</pre></div>"


def _colour(outcome: Outcome) -> str:
    if outcome.status is Status.ABSENT:
        return _ABSENT
    if outcome.status is Status.EXPECTED_FAILURE:
        return _EXPECTED
    if outcome.status is Status.MISSING:
        return _MISSING
    if outcome.status in (Status.ERROR, Status.TIMEOUT, Status.CRASHED):
        return _BROKEN
    if outcome.status.is_bad:
        return _BEYOND
    ratio = outcome.worst.ratio if outcome.worst else 0.0
    return next((shade for limit, shade, _ in _SHADES if ratio <= limit), _BEYOND)


def _cell(outcome: Outcome) -> str:
    worst = outcome.worst
    words = f"{outcome.case_id}: {outcome.status.value}"
    if worst is not None:
        words += f", {worst.output} error {number(worst.error)}, bound {number(worst.bound)}"
    return f"<i style='background:{_colour(outcome)}' title='{escape(words, quote=True)}'></i>"


def _heat_map(report: SuiteReport) -> Iterator[str]:
    yield "<h2>Error over bound, by op and sample</h2><p class='legend'>"
    legend = [(shade, words) for _, shade, words in _SHADES]
    legend += [
        (_BEYOND, "beyond"),
        (_BROKEN, "raised, hung or crashed"),
        (_MISSING, "op is missing"),
        (_EXPECTED, "expected failure"),
        (_ABSENT, "feature not declared"),
    ]
    for shade, words in legend:
        yield f"<span><i style='background:{shade}'></i>{words}</span>"
    yield "</p><table class='map'>"
    for group, outcomes in report.by_group().items():
        cells = "".join(_cell(outcome) for outcome in outcomes)
        yield f"<tr><td class='name'>{escape(group)}</td>"
        yield f"<td><div class='cells'>{cells}</div></td></tr>"
    yield "</table>"


def _bar(ratio: float) -> str:
    width = 100.0 if math.isinf(ratio) else min(100.0, 100.0 * ratio)
    over = " class='over'" if ratio > 1.0 else ""
    return f"<div class='bar'><i{over} style='width:{width:.0f}%'></i></div>"


def _table(report: SuiteReport) -> Iterator[str]:
    yield "<h2>Worst error per op and scenario</h2><table><tr><th></th><th>cases</th>"
    yield "<th>error / bound</th><th></th><th>in case</th><th>where</th>"
    yield "<th>why this bound</th></tr>"
    for group, outcomes in report.by_group().items():
        worst = worst_of(outcomes)
        if worst is None or worst.worst is None:
            yield f"<tr><td>{escape(group)}</td><td class='n'>{len(outcomes)}</td>"
            yield "<td></td><td></td><td></td><td></td><td></td></tr>"
            continue
        measure = worst.worst
        yield (
            f"<tr><td>{escape(group)}</td><td class='n'>{len(outcomes)}</td>"
            f"<td class='n'>{number(measure.error)} / {number(measure.bound)}</td>"
            f"<td>{_bar(measure.ratio)}</td><td>{escape(worst.case_id.partition(':')[2])}</td>"
            f"<td class='where'>{escape(measure.output)} {escape(measure.where)}</td>"
            f"<td class='origin'>{escape(measure.origin)}</td></tr>"
        )
    yield "</table>"


def _environment(report: SuiteReport) -> Iterator[str]:
    yield "<h2>Environment</h2><table>"
    for name, value in report.environment.items():
        yield f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
    yield "</table>"
