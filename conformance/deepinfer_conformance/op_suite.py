"""Op cases and error cases as cases of the suite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from deepinfer.device.backend import Backend
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.cases import OpCase, OpErrorCase, error_cases, op_cases
from deepinfer_conformance.outcome import Measure, Outcome, Status
from deepinfer_conformance.run import comparison_of, refusal_fault, run_case
from deepinfer_conformance.suite import CORE, Level, SuiteCase

_QUICK_SAMPLES = frozenset({"control", "n=0", "n=1", "nan-row"})


def suite_cases() -> Iterator[SuiteCase]:
    """Every op case, then every error case."""
    for case in op_cases(real_shapes=True):
        quick = case.sample.name in _QUICK_SAMPLES
        level = max(Level.QUICK if quick else Level.DEFAULT, Level(case.sample.level))
        yield SuiteCase(case.case_id, case.spec.feature or CORE, level, partial(_run_op, case))
    for error in error_cases():
        profile = error.spec.feature or CORE
        yield SuiteCase(error.case_id, profile, Level.DEFAULT, partial(_run_error, error))


def _run_op(case: OpCase, bench: Bench) -> Outcome:
    backend = bench.under_test(case.numerics)
    if case.spec not in backend.ops:
        return _missing(case, backend)
    if bench.backend_name == "reference":
        # The reference is compared with plain float64 loops: with itself it would always agree.
        result = run_case(backend, case, None)
    else:
        result = run_case(backend, case, bench.reference(case.numerics))
    profile = case.spec.feature or CORE
    if result.error:
        return Outcome(case.case_id, profile, Status.ERROR, message=result.error)
    measures = tuple(
        Measure.of(name, verdict, _origin(case, name)) for name, verdict in result.verdicts.items()
    )
    status = Status.PASSED if result.passed else Status.FAILED
    message = "" if result.passed else result.explain().splitlines()[0].partition(" ")[2]
    return Outcome(case.case_id, profile, status, measures=measures, message=message)


def _origin(case: OpCase, output: str) -> str:
    kind = comparison_of(case, output)
    return f"{type(kind).__name__}: {kind.origin}"


def _missing(case: OpCase | OpErrorCase, backend: Backend) -> Outcome:
    profile = case.spec.feature or CORE
    words = f"{backend.name} has no implementation of {case.spec.family}/{case.spec.name}"
    return Outcome(case.case_id, profile, Status.MISSING, message=words)


def _run_error(case: OpErrorCase, bench: Bench) -> Outcome:
    backend = bench.under_test(case.numerics)
    if case.spec not in backend.ops:
        return _missing(case, backend)
    fault = refusal_fault(backend, case)
    status = Status.FAILED if fault else Status.PASSED
    return Outcome(case.case_id, case.spec.feature or CORE, status, message=fault)
