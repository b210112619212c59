"""The golden list of case ids: adding or removing one shows in review."""

from __future__ import annotations

from importlib import resources

from deepinfer_conformance.suite import suite_cases


def test_case_ids_are_those_of_the_golden_list() -> None:
    """After a change on purpose: deepinfer conformance --full --list > .../cases.txt."""
    golden = resources.files("deepinfer_conformance") / "cases.txt"
    listed = golden.read_text(encoding="utf-8").split("\n")
    assert listed == [*(case.case_id for case in suite_cases()), ""]
