"""Cases and reports made by hand, without a backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer_conformance.bench import Bench
from deepinfer_conformance.outcome import Measure, Outcome, Status
from deepinfer_conformance.suite import CORE, Level, SuiteCase
from deepinfer_conformance.suite_report import SuiteReport

MakeCase = Callable[..., SuiteCase]
MakeReport = Callable[..., SuiteReport]


@pytest.fixture
def make_case() -> MakeCase:
    """A case that ends as told, or raises the exception given."""

    def make(
        case_id: str, status: Status | Exception = Status.PASSED, profile: str = CORE
    ) -> SuiteCase:
        def run(bench: Bench) -> Outcome:
            if isinstance(status, Exception):
                raise status
            return Outcome(case_id, profile, status)

        return SuiteCase(case_id, profile, Level.QUICK, run)

    return make


@pytest.fixture
def make_report() -> MakeReport:
    """A report of the outcomes given."""

    def make(*outcomes: Outcome, **changes: object) -> SuiteReport:
        fields: dict[str, object] = {
            "backend": "mychip",
            "options": {"emulated": True},
            "device": "mychip:0",
            "labels": ("emulated",),
            "level": "default",
            "query": "",
            "outcomes": outcomes,
            "problems": (),
            "environment": {"date_utc": "2026-11-30T00:00:00+00:00"},
            "seconds": 1.5,
        }
        return SuiteReport(**{**fields, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def failed() -> Outcome:
    """A failed scenario with everything an outcome can say."""
    return Outcome(
        "scenarios/greedy:exact,trained",
        CORE,
        Status.FAILED,
        seconds=2.0,
        measures=(Measure("gap", float("inf"), 0.5, "prompt 0 <1>", "margin", False),),
        message="tokens differ & more",
        first_difference="prefill step 0, layer 3, op kv/rope_store",
        notes=("streams 0 1e-3",),
    )
