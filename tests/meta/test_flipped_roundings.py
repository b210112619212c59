"""How far roundings alone carry greedy decoding: the ground of the margin in normative numerics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpTable
from deepinfer.device.ops import attention, load_all, mhc, norm, quant
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.isolation import run_guarded
from deepinfer_conformance.outcome import Status
from deepinfer_conformance.scenarios import against_reference
from deepinfer_conformance.scenarios.against_reference import MARGINS
from deepinfer_reference.backend import ReferenceBackend

_RATE = 1e-5
_SEED = 0
_FLIPPED = {
    quant.linear, quant.grouped_linear, norm.rmsnorm, attention.sparse_attention, mhc.mhc_expand,
}  # fmt: skip


def _flipping(function: Callable[..., Tensor], generator: torch.Generator) -> Callable[..., Tensor]:
    """`function` with one in 1e5 of its bf16 results moved to a neighbour."""

    @functools.wraps(function)
    def flipped(*args: Any, **named: Any) -> Tensor:  # noqa: ANN401
        result = function(*args, **named)
        if result.dtype is not torch.bfloat16:
            return result
        draws = torch.rand((2, *result.shape), generator=generator)
        step = torch.where(draws[1] < 0.5, 1, -1).to(torch.int16)
        bits = result.contiguous().view(torch.int16)
        moves = (draws[0] < _RATE) & (result != 0)
        return torch.where(moves, bits + step, bits).view(torch.bfloat16)

    return flipped


def flipped_roundings(config: BackendConfig) -> ReferenceBackend:
    """The reference with now and then a rounding that fell the other way."""
    backend = ReferenceBackend(config)
    generator = torch.Generator().manual_seed(_SEED)
    table = OpTable("flipped", device="cpu", dtype=backend.ops.dtype)
    for op in load_all().values():
        if op.compose is None:
            right = backend.ops[op]
            table.implements(op)(_flipping(right, generator) if op in _FLIPPED else right)
    backend.ops = table
    return backend


@pytest.mark.slow
def test_flipped_roundings_leave_greedy_tokens_at_gaps_inside_the_margin() -> None:
    """A margin below the gaps found here would fail backends that are right."""
    bench = Bench("flipped", {"runtime": "inline"}, load=flipped_roundings)
    case = next(
        case
        for case in against_reference.suite_cases()
        if case.case_id == "scenarios/greedy:normative,trained"
    )
    outcome = run_guarded(case, bench)
    assert outcome.status is Status.PASSED, outcome.message
    assert outcome.worst is not None
    assert 0.2 < outcome.worst.error < MARGINS[Numerics.NORMATIVE]
