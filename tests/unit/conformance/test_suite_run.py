"""Running cases: features, expected failures, exceptions, problems of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.device.errors import CapabilityError, ConfigError
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.expected import ExpectedFailure, parse
from deepinfer_conformance.isolation import Greeting, run_guarded
from deepinfer_conformance.outcome import Outcome, Status
from deepinfer_conformance.suite import Level, SuiteCase, suite_cases
from deepinfer_conformance.suite_report import ProfileVerdict, SuiteReport
from deepinfer_conformance.suite_run import Selection, run_suite

MakeCase = Callable[..., SuiteCase]


class FakeExecutor:
    """Runs cases here, on no backend."""

    def __init__(self, greeting: Greeting) -> None:
        self._greeting = greeting

    def greet(self) -> Greeting:
        return self._greeting

    def run(self, case: SuiteCase) -> Outcome:
        return run_guarded(case, Bench("nobody"))

    def close(self) -> None:
        return


def run(
    *cases: SuiteCase, expected: tuple[ExpectedFailure, ...] = (), query: str = "x"
) -> SuiteReport:
    executor = FakeExecutor(Greeting(frozenset({"declared"}), "cpu"))
    selection = Selection("nobody", {}, Level.DEFAULT, query)
    return run_suite(selection, executor, expected=expected, cases=cases)


def test_a_failure_does_not_stop_the_run(make_case: MakeCase) -> None:
    report = run(make_case("a:1", ValueError("broken")), make_case("b:1"))
    assert [outcome.status for outcome in report.outcomes] == [Status.ERROR, Status.PASSED]
    assert report.outcomes[0].message.startswith("ValueError: broken (run in ")
    assert not report.is_good
    assert report.profiles == {"core": ProfileVerdict.FAIL}


def test_undeclared_feature_is_absent_and_not_run(make_case: MakeCase) -> None:
    report = run(make_case("a:1"), make_case("b:1", ValueError("never run"), profile="other"))
    assert report.profiles == {"core": ProfileVerdict.PASS, "other": ProfileVerdict.ABSENT}
    assert report.is_good


def test_declared_feature_must_pass(make_case: MakeCase) -> None:
    report = run(make_case("a:1", Status.FAILED, profile="declared"))
    assert report.profiles == {"declared": ProfileVerdict.FAIL}
    assert not report.is_good


def test_expected_failure_is_good_and_carries_its_reason(make_case: MakeCase) -> None:
    entry = ExpectedFailure("a:*", "driver issue 7")
    report = run(make_case("a:1", Status.FAILED), expected=(entry,))
    assert report.is_good
    assert report.profiles == {"core": ProfileVerdict.EXPECTED_FAILURES}
    assert report.outcomes[0].message.startswith("driver issue 7")


def test_expected_failure_that_passes_is_bad(make_case: MakeCase) -> None:
    report = run(make_case("a:1"), expected=(ExpectedFailure("a:1", "driver issue 7"),))
    assert report.outcomes[0].status is Status.UNEXPECTED_PASS
    assert not report.is_good


def test_expected_failure_that_matches_nothing_is_a_problem(make_case: MakeCase) -> None:
    entry = ExpectedFailure("ops/no/such_op:*", "old")
    report = run(make_case("a:1"), expected=(entry,), query="")
    assert "'ops/no/such_op:*' (old) matches no case" in report.problems[0]
    assert not report.is_good


def test_missing_ops_are_named_and_are_no_failures(make_case: MakeCase) -> None:
    report = run(
        make_case("ops/moe/moe_gate:1", Status.MISSING),
        make_case("ops/moe/moe_gate:2", Status.MISSING),
    )
    assert report.missing_ops == ("moe/moe_gate",)
    assert report.failures == ()
    assert not report.is_good


def test_backend_that_cannot_be_had_is_refused_with_its_reason(make_case: MakeCase) -> None:
    executor = FakeExecutor(Greeting(refusal="no device"))
    with pytest.raises(CapabilityError, match="backend nobody cannot be tested: no device"):
        run_suite(Selection("nobody", {}), executor, cases=(make_case("a:1"),))


def test_no_case_is_not_good() -> None:
    assert not run().is_good


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cases: x", "holds a dict"),
        ("- cases: x", "entry 1 is"),
        ("- {cases: x, reason: ''}", "entry 1 is"),
        ("- [", "not YAML"),
    ],
)
def test_malformed_expected_failures_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, "file")


def test_case_ids_are_unique() -> None:
    ids = [case.case_id for case in suite_cases()]
    assert len(ids) == len(set(ids))


def test_levels_contain_each_other() -> None:
    quick, default, full = (
        {case.case_id for case in suite_cases(level)}
        for level in (Level.QUICK, Level.DEFAULT, Level.FULL)
    )
    assert quick < default < full
