"""Every op case and every error case, on the reference backend against naive float64 truths."""

from __future__ import annotations

import pytest

from deepinfer.device.backend import Backend
from deepinfer.device.numerics import Numerics
from deepinfer.device.samples import build_arguments
from deepinfer_conformance.cases import OpCase, OpErrorCase, error_cases, op_cases
from deepinfer_conformance.observe import run_op
from deepinfer_conformance.run import refusal_fault, run_case

Backends = dict[Numerics, Backend]


def _parameters(cases: tuple[OpCase, ...] | tuple[OpErrorCase, ...]) -> list[object]:
    return [pytest.param(case, id=case.case_id) for case in cases]


@pytest.mark.parametrize("case", _parameters(op_cases()))
def test_op_equals_its_naive_truth(backends: Backends, case: OpCase) -> None:
    result = run_case(backends[case.numerics], case, None)
    assert result.passed, result.explain()


@pytest.mark.parametrize("case", _parameters(error_cases()))
def test_op_refuses_wrong_arguments(backends: Backends, case: OpErrorCase) -> None:
    assert refusal_fault(backends[case.numerics], case) == ""


@pytest.mark.parametrize(
    "case", _parameters(op_cases("ops/compress/compress_pair:*,*padding*row*"))
)
def test_padding_entries_of_a_compression_are_finite(backends: Backends, case: OpCase) -> None:
    arguments = build_arguments(case.spec, case.sample, case.numerics)
    outputs = run_op(backends[case.numerics], case.spec, arguments)
    assert bool(outputs["out"].isfinite().all())
