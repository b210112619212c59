"""Every op case passes through the emulation, and every wrong call of an op is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import load_all
from deepinfer_ascend950.backend import Ascend950Backend
from deepinfer_ascend950.emulation.calls import EMULATED, EmulatedCalls
from deepinfer_ascend950.schema.signature import wheel_schemas
from deepinfer_conformance.cases import error_cases, op_cases
from deepinfer_conformance.run import Truth, refusal_fault, run_ops

Emulate = Callable[..., Ascend950Backend]


@pytest.mark.parametrize("truth", list(Truth))
@pytest.mark.parametrize("numerics", list(Numerics))
def test_every_op_case_passes(emulate: Emulate, numerics: Numerics, truth: Truth) -> None:
    report = run_ops(emulate(numerics), truth)
    assert "\n".join(failure.explain() for failure in report.failures) == ""
    assert len(report.results) == len([c for c in op_cases() if c.numerics is numerics]) > 500


@pytest.mark.parametrize("numerics", list(Numerics))
def test_every_wrong_call_is_refused(emulate: Emulate, numerics: Numerics) -> None:
    backend = emulate(numerics)
    faults = {
        case.case_id: refusal_fault(backend, case)
        for case in error_cases()
        if case.numerics is numerics
    }
    assert faults
    assert {case_id: fault for case_id, fault in faults.items() if fault} == {}


def test_every_op_says_what_it_uses_and_why(emulate: Emulate) -> None:
    choices = list(emulate(Numerics.NORMATIVE).ops.explain())
    assert len(choices) == len(load_all())
    composed = [choice.op for choice in choices if choice.implementation == "composed"]
    assert composed == ["indexer/index_select", "mhc/mhc_boundary", "spec/markov_step"]
    own = [choice for choice in choices if choice.op not in composed]
    assert all(choice.reason and choice.layout for choice in own)


def test_the_cases_call_every_operator_of_the_schemas(emulate: Emulate) -> None:
    called: set[str] = set()
    calls = EmulatedCalls(observer=lambda operator, arguments, result: called.add(operator))
    run_ops(emulate(Numerics.NORMATIVE, calls), Truth.REFERENCE)
    assert called == set(wheel_schemas().operators) == set(EMULATED)
