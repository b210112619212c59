"""The suite's proof of batch invariance can fail: for few rows, and for very many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.op import OpTable
from deepinfer.device.ops import load_all, quant
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.feature_cases import suite_cases
from deepinfer_conformance.outcome import Status
from deepinfer_reference.backend import ReferenceBackend

FEW, MANY = 100, 512


def _other_bits_from(num_rows: int, right: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(right)
    def wrong(x: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        out = right(x, *args, **kwargs)
        return out * (1 + 2**-7) if x.shape[0] >= num_rows else out

    return wrong


@pytest.mark.parametrize(("num_rows", "case"), [(FEW, "control"), (MANY, "n=520")])
def test_rows_with_other_bits_in_company_are_noticed(num_rows: int, case: str) -> None:
    def load(config: BackendConfig) -> ReferenceBackend:
        backend = ReferenceBackend(config)
        table = OpTable("mutant", device="cpu", dtype="any")
        for op in load_all().values():
            if op.compose is None:
                right = backend.ops[op]
                table.implements(op)(
                    _other_bits_from(num_rows, right) if op is quant.linear else right
                )
        backend.ops = table
        return backend

    case_id = f"features/batch_invariant/quant/linear:normative,{case}"
    (found,) = (each for each in suite_cases() if each.case_id == case_id)
    assert found.run(Bench("reference")).status is Status.PASSED
    assert found.run(Bench("reference", load=load)).status is Status.FAILED
