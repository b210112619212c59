"""Every op case and every error case, on the reference backend against naive float64 truths."""

from __future__ import annotations

import pytest

from deepinfer.device.backend import Backend
from deepinfer.device.numerics import Numerics
from deepinfer.device.samples import build_arguments
from deepinfer_conformance.cases import OpCase, OpErrorCase, error_cases, matches, op_cases
from deepinfer_conformance.observe import run_op
from deepinfer_conformance.run import refusal_fault, run_case

Backends = dict[Numerics, Backend]

# Contracts that the reference does not meet yet: pattern of case ids, reason. A gap that is
# closed fails here until its line is removed.
KNOWN_GAPS: tuple[tuple[str, str], ...] = (
    ("ops/compress/compress_pair:*,n=0,padding-entry", "indexes row 0 of an empty step"),
    ("ops/state/compress_plan:*,ratio=2,n=0", "indexes row 0 of an empty step"),
    ("ops/engram/engram_fetch_*:*,n=0", "reshapes an empty fetch with an unknown width"),
    ("ops/attention/sparse_attention:*,error=compressed-without-slots", "ignores the cache"),
    ("ops/attention/sparse_attention:*,error=slots-without-compressed", "ignores the slots"),
    ("ops/kv/copy_rows:*,error=two-*", "does not compare the two records"),
    ("ops/engram/*,error=foreign-*", "does not check the handle's class"),
    ("ops/moe/*,error=foreign-*", "does not check the handle's class"),
    ("ops/quant/*,error=foreign-*", "does not check the handle's class"),
)


def _parameters(cases: tuple[OpCase, ...] | tuple[OpErrorCase, ...]) -> list[object]:
    parameters: list[object] = []
    for case in cases:
        gaps = [reason for pattern, reason in KNOWN_GAPS if matches(case.case_id, pattern)]
        marks = [pytest.mark.xfail(reason=reason, strict=True) for reason in gaps]
        parameters.append(pytest.param(case, id=case.case_id, marks=marks))
    return parameters


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
