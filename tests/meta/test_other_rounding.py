"""A right backend that rounds differently passes: the bounds are not brittle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.formats import round_trip_a8
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec, OpTable
from deepinfer.device.ops import attention, load_all, mhc, norm, quant
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.isolation import run_guarded
from deepinfer_conformance.op_suite import suite_cases as op_suite_cases
from deepinfer_conformance.outcome import Status
from deepinfer_conformance.scenarios import against_reference
from deepinfer_reference.backend import ReferenceBackend
from deepinfer_reference.handles import DenseGrouped, DenseLinear, own_handle

Function = Callable[..., Any]


def _exactly_rounded(x: Tensor, weight: object) -> Tensor:
    """The product in float64 and one cast: another order of summation than any fp32 loop."""
    packed = own_handle(weight, DenseLinear)
    values = round_trip_a8(x) if packed.quantizes_input else x.float()
    return (values.double() @ packed.matrix.double()).to(x.dtype)


def _exactly_rounded_f32(x: Tensor, weight: object) -> Tensor:
    return (x.double() @ own_handle(weight, DenseLinear).matrix.double()).float()


def _halves_added(x: Tensor, weight: object) -> Tensor:
    """Split-K: two partial sums in fp32."""
    blocks = own_handle(weight, DenseGrouped).blocks
    half = blocks.shape[1] // 2
    values = x.float().transpose(0, 1)
    left = torch.bmm(values[..., :half], blocks[:, :half])
    return (torch.bmm(values[..., half:], blocks[:, half:]) + left).transpose(0, 1).to(x.dtype)


def _norm_in_double(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.double()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (weight * (values * scale)).to(x.dtype)


def _reversed_streams(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The collapse summed from the last stream to the first."""
    total = torch.zeros(streams[:, 0].shape)
    for index in reversed(range(streams.shape[1])):
        total = total + pre[:, index, None] * streams[:, index].float()
    return _norm_in_double(total.to(streams.dtype), weight, eps)


def _unrounded_probabilities(backend: ReferenceBackend) -> Function:
    """Attention with P in fp32 where the reference rounds it to bf16."""
    right = backend.ops[attention.sparse_attention]

    def sparse_attention(
        q: Tensor,
        window: Any,  # noqa: ANN401
        window_slots: Tensor,
        compressed: Any,  # noqa: ANN401
        compressed_slots: Tensor | None,
        *,
        sink: Tensor,
        scale: float,
    ) -> Tensor:
        return right(
            q.float(), window, window_slots, compressed, compressed_slots, sink=sink, scale=scale
        ).to(q.dtype)

    return sparse_attention


def other_rounding(config: BackendConfig) -> ReferenceBackend:
    """The reference with every product, norm and attention rounded in another way."""
    backend = ReferenceBackend(config)
    others: dict[OpSpec[..., Any], Function] = {
        quant.linear: _exactly_rounded,
        quant.linear_f32: _exactly_rounded_f32,
        quant.grouped_linear: _halves_added,
        norm.rmsnorm: _norm_in_double,
        mhc.mhc_collapse_norm: _reversed_streams,
        attention.sparse_attention: _unrounded_probabilities(backend),
    }
    table = OpTable("other", device="cpu", dtype=backend.ops.dtype)
    for op in load_all().values():
        if op.compose is None:
            table.implements(op)(others.get(op, backend.ops[op]))
    backend.ops = table
    return backend


@pytest.fixture(scope="module")
def bench() -> Bench:
    """The other rounding beside the reference."""
    return Bench("other", {"runtime": "inline"}, load=other_rounding)


@pytest.mark.parametrize("family", ["quant", "norm", "mhc", "attention"])
def test_other_rounding_passes_the_op_cases(bench: Bench, family: str) -> None:
    for case in op_suite_cases():
        if case.case_id.startswith(f"ops/{family}/") and "error=" not in case.case_id:
            outcome = run_guarded(case, bench)
            assert outcome.status is Status.PASSED, f"{case.case_id}: {outcome.message}"


def test_other_rounding_really_rounds_differently(bench: Bench) -> None:
    weight = torch.ones(64)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    other = bench.under_test(Numerics.EXACT).ops[norm.rmsnorm](x.float(), weight, 1e-6)
    same = bench.reference(Numerics.EXACT).ops[norm.rmsnorm](x.float(), weight, 1e-6)
    assert not torch.equal(other, same)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.case_id)
        for c in against_reference.suite_cases()
        # The same margin as without replay; one of the two modes is enough for a slow test.
        if c.case_id != "scenarios/greedy-bounded-replay:exact,trained"
    ],
)
def test_other_rounding_passes_the_scenarios(bench: Bench, case: Any) -> None:  # noqa: ANN401
    outcome = run_guarded(case, bench)
    assert outcome.status is Status.PASSED, (outcome.message, outcome.first_difference)
    worst = outcome.worst
    if "logits" in case.case_id:
        assert worst is not None
        assert worst.error > 0.0, "the other rounding did not reach the logits"
