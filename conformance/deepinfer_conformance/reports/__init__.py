"""A run written down: JSON for programs, Markdown and HTML for people, JUnit XML for CI."""

from __future__ import annotations

import json
from pathlib import Path

from deepinfer_conformance.reports.html_page import html_page
from deepinfer_conformance.reports.junit import junit_xml
from deepinfer_conformance.reports.markdown import markdown
from deepinfer_conformance.suite_report import SuiteReport

FILES = ("report.json", "report.md", "junit.xml", "report.html")


def write_reports(report: SuiteReport, folder: Path) -> tuple[Path, ...]:
    """Write all four files into `folder`, which is made if it is missing.

    Returns:
        Their paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = (
        json.dumps(report.to_json(), indent=1) + "\n",
        markdown(report),
        junit_xml(report),
        html_page(report),
    )
    paths = tuple(folder / name for name in FILES)
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def read_report(path: Path) -> SuiteReport:
    """A report from its JSON, or from the folder that holds it."""
    file = path / FILES[0] if path.is_dir() else path
    return SuiteReport.from_json(json.loads(file.read_text(encoding="utf-8")))
