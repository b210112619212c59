"""Every op case and error case on the interpreted backend, against the reference backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer_conformance.cases import OpCase, OpErrorCase, error_cases, op_cases
from deepinfer_conformance.run import refusal_fault, run_case
from deepinfer_cuda_sm100.plugin import deepinfer_create_backend
from deepinfer_reference.backend import ReferenceBackend

Backends = dict[Numerics, Backend]


def _parameters(cases: tuple[OpCase, ...] | tuple[OpErrorCase, ...]) -> list[object]:
    return [pytest.param(case, id=case.case_id) for case in cases]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Backends]:
    made: Backends = {
        mode: deepinfer_create_backend(BackendConfig("cuda_sm100", mode, {"interpret": True}))
        for mode in Numerics
    }
    yield made
    for backend in made.values():
        backend.close()


@pytest.fixture(scope="module")
def reference() -> Iterator[Backends]:
    made: Backends = {
        mode: ReferenceBackend(BackendConfig("reference", mode, {"runtime": "inline"}))
        for mode in Numerics
    }
    yield made
    for backend in made.values():
        backend.close()


@pytest.mark.parametrize("case", _parameters(op_cases()))
def test_op_equals_the_reference(interpreted: Backends, reference: Backends, case: OpCase) -> None:
    result = run_case(interpreted[case.numerics], case, reference[case.numerics])
    assert result.passed, result.explain()


@pytest.mark.parametrize("case", _parameters(error_cases()))
def test_op_refuses_wrong_arguments(interpreted: Backends, case: OpErrorCase) -> None:
    assert refusal_fault(interpreted[case.numerics], case) == ""
