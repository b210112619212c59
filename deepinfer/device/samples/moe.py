"""Samples of the moe family.

What `moe_dispatch` and `moe_experts` return is in the backend's own slot order, so it is seen
through the ops that follow; `probe_experts` are the weights used for a bare dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.device.comparison import Product
from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.ops import moe
from deepinfer.device.ops.moe import Routing
from deepinfer.device.samples import draws
from deepinfer.device.samples.canonical import (
    CanonicalBatch,
    CanonicalExperts,
    CanonicalLinear,
    CanonicalSlots,
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
    seeded_generator,
)
from deepinfer.device.weights import WeightFormat

Edit = Callable[[Tensor], Tensor]
_EXPERTS, _TOPK, _WIDTH, _INNER = 6, 2, 32, 32
PROBE_LIMIT = 10.0
_SEEN_THROUGH_EXPERTS = {
    "out": Product(origin="slot order is the backend's own: seen through experts and combine")
}


def probe_experts(num_experts: int, width: int) -> CanonicalExperts:
    """Experts that all differ, for looking at a dispatch.

    Args:
        num_experts: physical experts.
        width: D of the dispatched rows.
    """
    generator = seeded_generator("moe_dispatch", "probe experts")
    return _experts(generator, num_experts, width=width)


def _experts(
    generator: torch.Generator,
    num_experts: int,
    *,
    width: int = _WIDTH,
    inner: int = _INNER,
    fmt: WeightFormat = WeightFormat.MXFP4,
) -> CanonicalExperts:
    def stack(rows: int, cols: int) -> tuple[Any, ...]:
        return tuple(draws.matrix(generator, rows, cols, fmt) for _ in range(num_experts))

    return CanonicalExperts(stack(inner, width), stack(inner, width), stack(width, inner))


def _gate(
    rows: int = 5,
    *,
    k: int = _TOPK,
    fmt: WeightFormat = WeightFormat.BF16,
    logit_scale: float = 2.0,
    bias: Edit = torch.clone,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        x = draws.normal(generator, rows, _WIDTH, dtype=draws.activation_dtype(numerics))
        weight = draws.matrix(generator, _EXPERTS, _WIDTH, fmt)
        return {
            "x": edit(x * logit_scale),
            "weight": CanonicalLinear((weight,)),
            "bias": draws.vector(bias(0.1 * draws.normal(generator, _EXPERTS))),
            "num_experts_per_tok": k,
            "route_scale": 1.5,
        }

    return build


declare(
    moe.moe_gate,
    {
        "control": _gate(),
        "n=0": _gate(0),
        "n=1": _gate(1),
        "n=17": _gate(17),
        "k=1": _gate(k=1),
        "k=all": _gate(k=_EXPERTS),
        "weight=f32": _gate(fmt=WeightFormat.F32),
        "bias=0": _gate(bias=torch.zeros_like),
        "bias=decides": _gate(bias=lambda b: torch.arange(_EXPERTS) * 3.0),
        "bias=negative": _gate(bias=lambda b: b - 100.0),
        "all-tied": _gate(edit=torch.zeros_like, bias=torch.zeros_like),
        "logits=around-20": _gate(logit_scale=20.0),
        "logits=very-negative": _gate(edit=lambda x: -x.abs() * 20.0),
        "outlier-channel": _gate(edit=draws.with_outlier),
        "strided": _gate(edit=draws.strided),
    },
)
declare_sample(
    moe.moe_gate,
    Sample(
        "nan-row",
        _gate(edit=draws.with_nan_row),
        loose_rows={"ids": (4,), "weights": (4,)},
    ),
)


def _batch(
    generator: torch.Generator,
    numerics: Numerics,
    *,
    rows: int,
    invalid: tuple[int, ...],
    favourite: int | None,
    spare: bool,
    edit: Edit,
) -> CanonicalBatch:
    """Rows with distinct random experts; `favourite` sends every row's first pair there."""
    ids = torch.stack(
        [torch.randperm(_EXPERTS, generator=generator)[:_TOPK] for _ in range(rows)]
        or [torch.zeros(_TOPK, dtype=torch.int64)]
    )[:rows]
    if favourite is not None:
        ids[:, 0], ids[:, 1] = favourite, favourite + 1
    weights = torch.rand(rows, _TOPK, generator=generator) + 0.25
    physical = torch.randperm(_EXPERTS, generator=generator) if spare else torch.arange(_EXPERTS)
    valid = torch.ones(rows, dtype=torch.bool)
    valid[list(invalid)] = False
    x = draws.normal(generator, rows, _WIDTH, dtype=draws.activation_dtype(numerics))
    return CanonicalBatch(edit(x), Routing(ids, weights), physical, valid)


def _nan_where_invalid(x: Tensor) -> Tensor:
    x = x.clone()
    x[[1, -1]] = float("nan")
    return x


_BATCHES: dict[str, dict[str, Any]] = {
    "control": {},
    "n=0": {"rows": 0},
    "n=1": {"rows": 1},
    "n=17": {"rows": 17},
    "invalid-rows": {"invalid": (1, 4)},
    "all-invalid": {"invalid": (0, 1, 2, 3, 4)},
    "one-expert-takes-all": {"favourite": 2},
    "last-expert": {"favourite": _EXPERTS - 2},
    "permuted-experts": {"spare": True},
    "strided": {"edit": draws.strided},
    "outlier-channel": {"edit": draws.with_outlier},
    "invalid-rows-hold-nan": {"invalid": (1, 4), "edit": _nan_where_invalid},
}


def _make(
    generator: torch.Generator, numerics: Numerics, options: dict[str, Any]
) -> CanonicalBatch:
    control = {
        "rows": 5,
        "invalid": (),
        "favourite": None,
        "spare": False,
        "edit": torch.clone,
    }
    return _batch(generator, numerics, **{**control, **options})


def _dispatch(options: dict[str, Any]) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        batch = _make(generator, numerics, options)
        return {
            "x": batch.x,
            "routing": batch.routing,
            "physical": batch.physical,
            "valid": batch.valid,
        }

    return build


def _run(
    options: dict[str, Any],
    *,
    limit: float = PROBE_LIMIT,
    inner: int = _INNER,
    fmt: WeightFormat = WeightFormat.MXFP4,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        batch = _make(generator, numerics, options)
        experts = _experts(generator, _EXPERTS, inner=inner, fmt=fmt)
        return {"batch": batch, "weights": experts, "swiglu_limit": limit}

    return build


def _combine(options: dict[str, Any], *, fill: bool) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        batch = _make(generator, numerics, options)
        dtype = draws.activation_dtype(numerics)
        row = draws.normal(generator, _WIDTH, dtype=dtype) if fill else None
        slots = CanonicalSlots(batch, _experts(generator, _EXPERTS), PROBE_LIMIT, row)
        shared = draws.normal(generator, batch.x.shape[0], _WIDTH, dtype=dtype)
        return {"outputs": slots, "batch": batch, "shared": shared}

    return build


for _name, _options in _BATCHES.items():
    declare_sample(
        moe.moe_dispatch, Sample(_name, _dispatch(_options), compare=_SEEN_THROUGH_EXPERTS)
    )
    declare_sample(moe.moe_experts, Sample(_name, _run(_options)))
    # Equal slot outputs are known to the bit; real ones carry the error of the experts.
    declare(moe.moe_combine, {f"{_name},equal-slots": _combine(_options, fill=True)})
    declare_sample(
        moe.moe_combine,
        Sample(_name, _combine(_options, fill=False), compare=_SEEN_THROUGH_EXPERTS),
    )
declare(
    moe.moe_experts,
    {
        "limit=0.5": _run({}, limit=0.5),
        "inner=64": _run({}, inner=64),
        # Several blocks of scales along the inner dimension, the last one partly filled.
        "inner=160": _run({}, inner=160),
        "weights=fp8": _run({}, fmt=WeightFormat.FP8_TILE32),
        "weights=bf16": _run({}, fmt=WeightFormat.BF16),
    },
)


def _swiglu(
    rows: int = 5, *, inner: int = 48, limit: float = 10.0, edit: Edit = torch.clone
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        gate_up = draws.normal(generator, rows, 2 * inner, dtype=dtype)
        return {"gate_up": edit(gate_up), "swiglu_limit": limit}

    return build


declare(
    moe.swiglu,
    {
        "control": _swiglu(),
        "n=0": _swiglu(0),
        "n=1": _swiglu(1),
        "n=17": _swiglu(17),
        "inner=1": _swiglu(inner=1),
        "clamped": _swiglu(limit=0.5),
        "at-the-limit": _swiglu(edit=lambda x: torch.where(x > 0, 10.0, -10.0).to(x.dtype)),
        "far-beyond": _swiglu(edit=lambda x: x * 200.0),
        "zeros": _swiglu(edit=torch.zeros_like),
        "one-nan": _swiglu(edit=draws.with_one_nan),
        "strided": _swiglu(edit=draws.strided),
    },
)
declare_sample(
    moe.swiglu, Sample("nan-row", _swiglu(edit=draws.with_nan_row), loose_rows={"out": (4,)})
)


def _foreign(build_rest: Builder, argument: str) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {**build_rest(generator, numerics), argument: ForeignHandle(argument)}

    return build


_FOREIGN: tuple[tuple[OpSpec[..., Any], str, Builder], ...] = (
    (moe.moe_gate, "foreign-weight", _foreign(_gate(), "weight")),
    (moe.moe_experts, "foreign-batch", _foreign(_run({}), "batch")),
    (moe.moe_experts, "foreign-weights", _foreign(_run({}), "weights")),
    (moe.moe_combine, "foreign-batch", _foreign(_combine({}, fill=False), "batch")),
)
for _spec, _name, _build in _FOREIGN:
    declare_error(_spec, ErrorCase(_name, _build, ContractError, "handle"))
