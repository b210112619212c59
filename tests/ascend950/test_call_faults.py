"""A wrong call of an operator does not get past the checks: each fault is planted in one call.

BINDING faults are refused by the schema, DOCUMENTED ones by a constraint of the operator's page,
VALUE faults give numbers that the op's cases refuse.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.numerics import Numerics
from deepinfer_ascend950.backend import Ascend950Backend
from deepinfer_ascend950.emulation.calls import EmulatedCalls
from deepinfer_conformance.cases import op_cases
from deepinfer_conformance.run import CaseResult, run_case

Emulate = Callable[..., Ascend950Backend]
Args = list[Any]
Kwargs = dict[str, Any]


class CaughtBy(enum.Enum):
    """Which check refuses a fault."""

    BINDING = "Schema:"
    DOCUMENTED = "see its page"
    VALUE = ""


@dataclass(frozen=True)
class Fault:
    """A change of every call of an operator, and the cases that have to notice it."""

    name: str
    operator: str
    cases: str
    caught_by: CaughtBy
    edit: Callable[[Args, Kwargs], None]
    only_if: Callable[[Kwargs], bool] = lambda kwargs: True


class FaultyCalls:
    """Emulated calls with one fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.inner, self.planted = fault, EmulatedCalls(), 0

    def __call__(self, operator: str, *args: object, **kwargs: object) -> object:
        edited, named = list(args), dict(kwargs)
        if operator == self.fault.operator and self.fault.only_if(named):
            self.fault.edit(edited, named)
            self.planted += 1
        return self.inner(operator, *edited, **named)


def put(**values: object) -> Callable[[Args, Kwargs], None]:
    """Give keywords other values."""
    return lambda args, kwargs: kwargs.update(values)


def drop(*names: str) -> Callable[[Args, Kwargs], None]:
    """Leave keywords out."""

    def edit(args: Args, kwargs: Kwargs) -> None:
        for name in names:
            kwargs.pop(name)

    return edit


def rename(name: str, other: str) -> Callable[[Args, Kwargs], None]:
    """Give a keyword another name."""
    return lambda args, kwargs: kwargs.update({other: kwargs.pop(name)})


def change(place: int | str, function: Callable[[Any], Any]) -> Callable[[Args, Kwargs], None]:
    """Change one positional or keyword argument."""

    def edit(args: Args, kwargs: Kwargs) -> None:
        if isinstance(place, int):
            args[place] = function(args[place])
        else:
            kwargs[place] = function(kwargs[place])

    return edit


def swap_scales(args: Args, kwargs: Kwargs) -> None:
    args[2], kwargs["pertoken_scale"] = kwargs["pertoken_scale"], args[2]


def places_by_rows(args: Args, kwargs: Kwargs) -> None:
    args[5] = args[5].view(kwargs["k"], -1).T.flatten()


def bytes_as_uint8(args: Args, kwargs: Kwargs) -> None:
    args[0], args[2] = args[0].view(torch.uint8), args[2].view(torch.uint8)


def skipped_at_minus_one(args: Args, kwargs: Kwargs) -> None:
    args[1] = torch.where(args[1] == args[0].shape[0] - 1, -1, args[1])


def scale_of_the_first_row_only(scale: Tensor) -> Tensor:
    """[K/64, N, 2] scales as if a tile's scale stood for its first row alone."""
    broken = torch.full_like(scale.transpose(0, 1), 127)
    broken[::32] = scale.transpose(0, 1)[::32]
    return broken.transpose(0, 1)


def first(function: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Change the only tensor of a list."""
    return lambda tensors: [function(tensors[0])]


def swapped_nibbles(weight: Tensor) -> Tensor:
    stored = weight.transpose(1, 2)
    return ((stored >> 4) | (stored << 4)).transpose(1, 2)


def is_fp4(kwargs: Kwargs) -> bool:
    return "weight_dtype" in kwargs


QUANT, MATMUL, GROUPED = "npu_dynamic_mx_quant", "npu_quant_matmul", "npu_grouped_matmul"
LINEAR, EXPERTS, COMBINE = "ops/quant/linear:", "ops/moe/moe_experts:", "ops/moe/moe_combine:"
BINDING, DOCUMENTED, VALUE = CaughtBy.BINDING, CaughtBy.DOCUMENTED, CaughtBy.VALUE
FAULTS = (
    Fault("swapped scales", MATMUL, LINEAR, DOCUMENTED, swap_scales),
    Fault("misspelt keyword", MATMUL, LINEAR, BINDING, rename("pertoken_scale", "per_token_scale")),
    Fault("keyword-only by position", MATMUL, LINEAR, BINDING, lambda a, k: a.append(None)),
    Fault("required argument missing", MATMUL, LINEAR, BINDING, lambda a, k: a.pop()),
    Fault("unknown dtype code", MATMUL, LINEAR, BINDING, put(scale_dtype=294)),
    Fault("torch dtype for a code", MATMUL, LINEAR, BINDING, put(output_dtype=torch.bfloat16)),
    Fault("scale dtype code of e4m3", MATMUL, LINEAR, DOCUMENTED, put(pertoken_scale_dtype=292)),
    Fault("output dtype code of fp16", MATMUL, LINEAR, VALUE, put(output_dtype=5)),
    Fault("groups of 128", MATMUL, LINEAR, DOCUMENTED, put(group_sizes=[1, 1, 128])),
    Fault("matrix not transposed", MATMUL, LINEAR, DOCUMENTED, change(1, lambda m: m.T)),
    Fault(
        "matrix transposed, its scale not",
        MATMUL, LINEAR, DOCUMENTED, change(2, lambda s: s.contiguous()),
    ),
    Fault("tile scale not repeated", MATMUL, LINEAR, VALUE, change(2, scale_of_the_first_row_only)),
    Fault(
        "scale pairs reversed",
        MATMUL, LINEAR, VALUE,
        change(2, lambda s: s.transpose(0, 1).flip(-1).contiguous().transpose(0, 1)),
    ),
    Fault("default destination (FP4)", QUANT, LINEAR, DOCUMENTED, drop("dst_type")),
    Fault(
        "OCP scales", QUANT, "ops/quant/quantize_a8:", VALUE, put(scale_alg=0, max_low_bound=0.0)
    ),
    Fault("no amax floor", QUANT, "ops/quant/quantize_a8:", VALUE, put(max_low_bound=0.0)),
    Fault("floor with OCP scales", QUANT, LINEAR, DOCUMENTED, put(scale_alg=0)),
    Fault("integer flag as a bool", QUANT, LINEAR, BINDING, put(block_size=True)),
    Fault("counts read as sums", GROUPED, EXPERTS, DOCUMENTED, put(group_list_type=0)),
    Fault(
        "sums read as counts",
        GROUPED, EXPERTS, DOCUMENTED, change("group_list", lambda c: c.cumsum(0)),
    ),
    Fault(
        "group list of int32",
        GROUPED, EXPERTS, DOCUMENTED, change("group_list", lambda c: c.to(torch.int32)),
    ),
    Fault(
        "FP4 scale as `scale`",
        GROUPED, EXPERTS, DOCUMENTED, rename("antiquant_scale", "scale"), is_fp4,
    ),
    Fault(
        "FP4 weight without its code", GROUPED, EXPERTS, DOCUMENTED, drop("weight_dtype"), is_fp4
    ),
    Fault("x declared as e4m3", GROUPED, EXPERTS, DOCUMENTED, put(x_dtype=292), is_fp4),
    Fault(
        "FP4 weight made contiguous",
        GROUPED, EXPERTS, DOCUMENTED, change(1, first(Tensor.contiguous)), is_fp4,
    ),
    Fault(
        "FP4 scale made contiguous",
        GROUPED, EXPERTS, DOCUMENTED,
        change("antiquant_scale", first(Tensor.contiguous)), is_fp4,
    ),
    Fault("nibbles swapped", GROUPED, EXPERTS, VALUE, change(1, first(swapped_nibbles)), is_fp4),
    Fault("several results asked for", GROUPED, EXPERTS, DOCUMENTED, put(split_item=0)),
    Fault(
        "places by rows",
        "npu_moe_finalize_routing", COMBINE, VALUE, places_by_rows,
    ),
    Fault(
        "places of int64",
        "npu_moe_finalize_routing", COMBINE, DOCUMENTED, change(5, lambda i: i.long()),
    ),
    Fault(
        "no weights for k results",
        "npu_moe_finalize_routing", COMBINE, DOCUMENTED, change(4, lambda s: None),
    ),
    Fault(
        "padding rows sent to expert -1",
        "npu_moe_token_permute", "ops/moe/moe_dispatch:", DOCUMENTED,
        change(1, lambda e: torch.where(e >= 1 << 20, -1, e)),
    ),
    Fault("mixing not returned", "npu_mhc_pre", "ops/mhc/mhc_mix:", VALUE, put(out_flag=0)),
    Fault(
        "projection transposed",
        "npu_mhc_pre", "ops/mhc/mhc_mix:", DOCUMENTED, change(1, lambda p: p.T),
    ),
    Fault("default norm eps", "npu_mhc_pre", "ops/mhc/mhc_mix:", VALUE, put(norm_eps=1e-2)),
    Fault(
        "one iteration less",
        "npu_mhc_sinkhorn", "ops/mhc/mhc_mix:", VALUE, change("num_iters", lambda n: max(1, n - 1)),
    ),
    Fault(
        "residual matrix transposed twice",
        "npu_mhc_post", "ops/mhc/mhc_expand:", VALUE, change(1, lambda c: c.transpose(1, 2)),
    ),
    Fault(
        "gamma in bf16", "npu_rms_norm", "ops/norm/rmsnorm:", DOCUMENTED, change(1, Tensor.bfloat16)
    ),
    Fault("eps left out", "npu_rms_norm", "ops/norm/rmsnorm:", VALUE, lambda a, k: a.pop()),
    Fault(
        "index without its dimension",
        "npu_scatter_nd_update_", "ops/kv/rope_store:", DOCUMENTED, change(1, Tensor.flatten),
    ),
    Fault(
        "skipped rows at -1",
        "npu_scatter_nd_update_", "ops/kv/rope_store:", DOCUMENTED, skipped_at_minus_one,
    ),
    Fault(
        "bytes as uint8",
        "npu_scatter_nd_update_", "ops/kv/rope_store:", DOCUMENTED, bytes_as_uint8,
    ),
    Fault(
        "x not permuted",
        "npu_transpose_batchmatmul", "ops/quant/grouped_linear:", DOCUMENTED,
        put(perm_x1=[0, 1, 2]),
    ),
    Fault(
        "result not permuted",
        "npu_transpose_batchmatmul", "ops/quant/grouped_linear:", DOCUMENTED, put(perm_y=[0, 1, 2]),
    ),
)  # fmt: skip


def _results(
    emulate: Emulate, reference: Backend, calls: FaultyCalls, query: str
) -> list[CaseResult]:
    backend = emulate(Numerics.NORMATIVE, calls)
    return [
        run_case(backend, case, reference)
        for case in op_cases(query)
        if case.numerics is Numerics.NORMATIVE
    ]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.operator}: {fault.name}")
def test_planted_fault_is_caught(
    fault: Fault, emulate: Emulate, references: Mapping[Numerics, Backend]
) -> None:
    calls = FaultyCalls(fault)
    results = _results(emulate, references[Numerics.NORMATIVE], calls, fault.cases)
    assert calls.planted, "no case calls the operator"
    failed = [result for result in results if not result.passed]
    assert failed
    if fault.caught_by is CaughtBy.VALUE:
        assert any(not result.error for result in failed), failed[0].error
    else:
        assert any(fault.caught_by.value in result.error for result in failed)


def test_unplanted_calls_pass(emulate: Emulate, references: Mapping[Numerics, Backend]) -> None:
    none = Fault("nothing", MATMUL, LINEAR, VALUE, lambda args, kwargs: None)
    results = _results(emulate, references[Numerics.NORMATIVE], FaultyCalls(none), LINEAR)
    assert all(result.passed for result in results)


def test_faults_are_many_and_of_every_kind() -> None:
    assert len(FAULTS) >= 15
    assert {fault.caught_by for fault in FAULTS} == set(CaughtBy)
    assert len({fault.operator for fault in FAULTS}) == 11
