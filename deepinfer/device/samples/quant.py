"""Samples of the quant family: packed products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.ops import quant
from deepinfer.device.samples import draws, quantizers
from deepinfer.device.samples.canonical import (
    CanonicalEmbedding,
    CanonicalGrouped,
    CanonicalLinear,
    ForeignHandle,
)
from deepinfer.device.samples.registry import (
    Arguments,
    Builder,
    ErrorCase,
    Sample,
    declare,
    declare_error,
    declare_sample,
)
from deepinfer.device.weights import WeightFormat, stored_from_float

_FP8 = WeightFormat.FP8_TILE32
Edit = Callable[[Tensor], Tensor]


def _embed(
    ids: list[int], fmt: WeightFormat = WeightFormat.BF16, edit: Edit = torch.clone
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        table = stored_from_float(draws.normal(generator, 11, 48), fmt)
        index = torch.tensor(ids, dtype=torch.int64)
        return {"ids": edit(index), "table": CanonicalEmbedding(table)}

    return build


declare(
    quant.embed,
    {
        "control": _embed([3, 1, 7]),
        "n=0": _embed([]),
        "n=1": _embed([4]),
        "first-and-last-id": _embed([0, 10]),
        "repeated": _embed([5, 5, 5, 2, 5]),
        "table=f32": _embed([3, 1, 7], WeightFormat.F32),
        "strided": _embed([3, 1, 7, 10], edit=draws.strided),
    },
)


def _linear(
    rows: int = 5,
    inner: int = 96,
    *,
    outputs: tuple[int, ...] = (40,),
    fmt: WeightFormat = _FP8,
    edit: Edit = torch.clone,
    dtype: torch.dtype | None = None,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        x = draws.normal(generator, rows, inner, dtype=dtype or draws.activation_dtype(numerics))
        parts = tuple(draws.matrix(generator, n, inner, fmt) for n in outputs)
        return {"x": edit(x), "weight": CanonicalLinear(parts)}

    return build


def _zero_group(x: Tensor) -> Tensor:
    x = x.clone()
    x[1, 32:64] = 0.0
    return x


def _below_floor(x: Tensor) -> Tensor:
    """One group whose amax lies below the quantiser's floor."""
    x = x.clone()
    x[2, :32] *= 2.0**-20
    return x


declare(
    quant.linear,
    {
        "control": _linear(),
        "n=0": _linear(0),
        "n=1": _linear(1),
        "n=17": _linear(17, outputs=(8,)),
        "parts=3": _linear(outputs=(32, 40, 8)),
        # Long enough for the inner dimension to be split among programs.
        "inner=544": _linear(3, 544),
        "one-group": _linear(inner=32),
        "weight=mxfp4": _linear(fmt=WeightFormat.MXFP4),
        "weight=bf16": _linear(fmt=WeightFormat.BF16),
        "weight=bf16,inner=70": _linear(inner=70, fmt=WeightFormat.BF16),
        "weight=f32": _linear(fmt=WeightFormat.F32),
        "strided": _linear(edit=draws.strided),
        "outlier-channel": _linear(edit=draws.with_outlier),
        "zero-group": _linear(edit=_zero_group),
        "one-nan": _linear(edit=draws.with_one_nan),
        "below-amax-floor": _linear(edit=_below_floor),
        "large-values": _linear(edit=lambda x: x * 2.0**40),
    },
)
declare_sample(
    quant.linear, Sample("nan-row", _linear(edit=draws.with_nan_row), loose_rows={"out": (4,)})
)
# A prompt's chunk; the inner dimension may be split here as well.
declare_sample(quant.linear, Sample("n=520", _linear(520, 544, outputs=(8,)), many_rows=True))
declare(
    quant.linear_f32,
    {
        "control": _linear(fmt=WeightFormat.F32),
        "n=0": _linear(0, fmt=WeightFormat.F32),
        "n=1": _linear(1, fmt=WeightFormat.F32),
        "n=17": _linear(17, outputs=(8,), fmt=WeightFormat.F32),
        "weight=bf16": _linear(fmt=WeightFormat.BF16),
        "parts=2": _linear(outputs=(24, 24), fmt=WeightFormat.BF16),
        "inner=70": _linear(inner=70, fmt=WeightFormat.F32),
        "x=f32": _linear(fmt=WeightFormat.BF16, dtype=torch.float32),
        "x=bf16": _linear(fmt=WeightFormat.F32, dtype=torch.bfloat16),
        "strided": _linear(fmt=WeightFormat.F32, edit=draws.strided),
        "outlier-channel": _linear(fmt=WeightFormat.F32, edit=draws.with_outlier),
    },
)
declare_sample(
    quant.linear_f32,
    Sample(
        "nan-row",
        _linear(fmt=WeightFormat.F32, edit=draws.with_nan_row),
        loose_rows={"out": (4,)},
    ),
)


def _grouped(
    rows: int = 3,
    *,
    num_groups: int = 4,
    inner: int = 32,
    outputs: int = 10,
    fmt: WeightFormat = _FP8,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        x = draws.normal(generator, rows, num_groups, inner, dtype=dtype)
        weight = draws.matrix(generator, num_groups * outputs, inner, fmt)
        return {"x": edit(x), "weight": CanonicalGrouped(weight, num_groups)}

    return build


declare(
    quant.grouped_linear,
    {
        "control": _grouped(),
        "n=0": _grouped(0),
        "n=1": _grouped(1),
        "n=17": _grouped(17, outputs=4),
        "groups=1": _grouped(num_groups=1),
        "weight=bf16": _grouped(fmt=WeightFormat.BF16),
        "inner=not-multiple-of-32": _grouped(inner=20),
        "strided": _grouped(edit=draws.strided),
        "outlier-channel": _grouped(edit=draws.with_outlier),
    },
)
declare_sample(
    quant.grouped_linear,
    Sample("nan-row", _grouped(edit=draws.with_nan_row), loose_rows={"out": (2,)}),
)


def _foreign(argument: str, rest: Callable[[Numerics], Arguments]) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {**rest(numerics), argument: ForeignHandle(argument)}

    return build


def _x_only(*shape: int) -> Callable[[Numerics], Arguments]:
    return lambda numerics: {"x": torch.zeros(shape, dtype=draws.activation_dtype(numerics))}


_FOREIGN: tuple[tuple[OpSpec[..., Any], Builder], ...] = (
    (quant.embed, _foreign("table", lambda _: {"ids": torch.zeros(2, dtype=torch.int64)})),
    (quant.linear, _foreign("weight", _x_only(2, 32))),
    (quant.linear_f32, _foreign("weight", _x_only(2, 32))),
    (quant.grouped_linear, _foreign("weight", _x_only(2, 4, 32))),
)
for _spec, _build in _FOREIGN:
    declare_error(_spec, ErrorCase("foreign-handle", _build, ContractError, "handle"))

declare(quant.quantize_a8, quantizers.A8)
declare(quant.quantize_q4_ue8m0, quantizers.Q4_UE8M0)
declare(quant.quantize_q4_e4m3, quantizers.Q4_E4M3)
