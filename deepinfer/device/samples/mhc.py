"""Samples of the mhc family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import mhc
from deepinfer.device.ops.mhc import MhcMix
from deepinfer.device.samples import draws
from deepinfer.device.samples.canonical import CanonicalMhc
from deepinfer.device.samples.registry import (
    Arguments,
    Builder,
    Sample,
    declare,
    declare_sample,
)

Edit = Callable[[Tensor], Tensor]
_STREAMS, _WIDTH = 4, 32
_LOOSE_MIX = {"pre": (3,), "post": (3,), "comb": (3,)}


def _weights(generator: torch.Generator, streams: int, scale: float) -> CanonicalMhc:
    outputs = (2 + streams) * streams
    inner = streams * _WIDTH
    return CanonicalMhc(
        fn=draws.vector(draws.normal(generator, outputs, inner) * inner**-0.5),
        scale=draws.vector(torch.tensor([1.0, 0.7, 1.3]) * scale),
        base=draws.vector(0.5 * draws.normal(generator, outputs)),
    )


def _mixing(generator: torch.Generator, rows: int, streams: int) -> MhcMix:
    comb = torch.softmax(draws.normal(generator, rows, streams, streams), dim=-1)
    pre = torch.sigmoid(draws.normal(generator, rows, streams))
    return MhcMix(pre, 2.0 * torch.sigmoid(draws.normal(generator, rows, streams)), comb)


def _streams(generator: torch.Generator, numerics: Numerics, rows: int, streams: int) -> Tensor:
    dtype = draws.activation_dtype(numerics)
    return draws.normal(generator, rows, streams, _WIDTH, dtype=dtype)


def _mix(
    rows: int = 4,
    *,
    streams: int = _STREAMS,
    num_iters: int = 20,
    norm_eps: float = 1e-20,
    hc_eps: float = 1e-6,
    scale: float = 1.0,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {
            "streams": edit(_streams(generator, numerics, rows, streams)),
            "weights": _weights(generator, streams, scale),
            "norm_eps": norm_eps,
            "hc_eps": hc_eps,
            "num_iters": num_iters,
        }

    return build


def _zero_row(x: Tensor) -> Tensor:
    x = x.clone()
    x[1] = 0.0
    return x


declare(
    mhc.mhc_mix,
    {
        "control": _mix(),
        "n=0": _mix(0),
        "n=1": _mix(1),
        "n=17": _mix(17, num_iters=2),
        "streams=1": _mix(streams=1),
        "streams=2": _mix(streams=2),
        "iterations=1": _mix(num_iters=1),
        "iterations=2": _mix(num_iters=2),
        "hc-eps=1e-2": _mix(hc_eps=1e-2),
        "norm-eps=1e-1": _mix(norm_eps=1e-1),
        "steep": _mix(scale=8.0),
        "zero-row": _mix(edit=_zero_row),
        "equal-streams": _mix(edit=lambda x: x[:, :1].repeat(1, x.shape[1], 1)),
        "outlier-channel": _mix(edit=draws.with_outlier),
        "strided": _mix(edit=draws.strided),
    },
)
declare_sample(mhc.mhc_mix, Sample("nan-row", _mix(edit=draws.with_nan_row), loose_rows=_LOOSE_MIX))


def _sum(
    rows: int = 4,
    *,
    streams: int = _STREAMS,
    mean: bool = False,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        pre = _mixing(generator, rows, streams).pre
        if mean:
            pre = torch.full_like(pre, 1.0 / streams)
        return {"streams": edit(_streams(generator, numerics, rows, streams)), "pre": pre}

    return build


declare(
    mhc.mhc_collapse,
    {
        "control": _sum(),
        "n=0": _sum(0),
        "n=1": _sum(1),
        "n=17": _sum(17),
        "streams=1": _sum(streams=1),
        "mean": _sum(mean=True),
        "mean,streams=3": _sum(streams=3, mean=True),
        "zero-row": _sum(edit=_zero_row),
        "outlier-channel": _sum(edit=draws.with_outlier),
        "strided": _sum(edit=draws.strided),
    },
)
declare_sample(
    mhc.mhc_collapse,
    Sample("nan-row", _sum(edit=draws.with_nan_row), loose_rows={"out": (3,)}),
)


def _collapse(
    rows: int = 4,
    *,
    streams: int = _STREAMS,
    one_hot: bool = False,
    eps: float = 1e-20,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        pre = _mixing(generator, rows, streams).pre
        if one_hot:
            pre = torch.zeros_like(pre)
            pre[:, 0] = 1.0
        return {
            "streams": edit(_streams(generator, numerics, rows, streams)),
            "pre": pre,
            "weight": draws.norm_weight(generator, _WIDTH),
            "eps": eps,
        }

    return build


declare(
    mhc.mhc_collapse_norm,
    {
        "control": _collapse(),
        "n=0": _collapse(0),
        "n=1": _collapse(1),
        "n=17": _collapse(17),
        "streams=1": _collapse(streams=1),
        "one-hot": _collapse(one_hot=True),
        "eps=1e-2": _collapse(eps=1e-2),
        "zero-row": _collapse(edit=_zero_row),
        "outlier-channel": _collapse(edit=draws.with_outlier),
        "strided": _collapse(edit=draws.strided),
    },
)
declare_sample(
    mhc.mhc_collapse_norm,
    Sample("nan-row", _collapse(edit=draws.with_nan_row), loose_rows={"out": (3,)}),
)


def _expand(rows: int = 4, *, streams: int = _STREAMS, edit: Edit = torch.clone) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        mix = _mixing(generator, rows, streams)
        y = draws.normal(generator, rows, _WIDTH, dtype=draws.activation_dtype(numerics))
        residual = _streams(generator, numerics, rows, streams)
        return {"y": edit(y), "streams": edit(residual), "post": mix.post, "comb": mix.comb}

    return build


declare(
    mhc.mhc_expand,
    {
        "control": _expand(),
        "n=0": _expand(0),
        "n=1": _expand(1),
        "n=17": _expand(17),
        "streams=1": _expand(streams=1),
        "streams=2": _expand(streams=2),
        "zero-row": _expand(edit=_zero_row),
        "outlier-channel": _expand(edit=draws.with_outlier),
        "strided": _expand(edit=draws.strided),
    },
)
declare_sample(
    mhc.mhc_expand,
    Sample("nan-row", _expand(edit=draws.with_nan_row), loose_rows={"out": (3,)}),
)


def _boundary(rows: int = 4, *, num_iters: int = 20, edit: Edit = torch.clone) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        y = draws.normal(generator, rows, _WIDTH, dtype=draws.activation_dtype(numerics))
        return {
            "y": edit(y),
            "streams": edit(_streams(generator, numerics, rows, _STREAMS)),
            "mix": _mixing(generator, rows, _STREAMS),
            "weights": _weights(generator, _STREAMS, 1.0),
            "norm_weight": draws.norm_weight(generator, _WIDTH),
            "norm_eps": 1e-20,
            "hc_eps": 1e-6,
            "num_iters": num_iters,
        }

    return build


declare(
    mhc.mhc_boundary,
    {
        "control": _boundary(),
        "n=0": _boundary(0),
        "n=1": _boundary(1),
        "iterations=1": _boundary(num_iters=1),
        "outlier-channel": _boundary(edit=draws.with_outlier),
        "strided": _boundary(edit=draws.strided),
    },
)
declare_sample(
    mhc.mhc_boundary,
    Sample(
        "nan-row",
        _boundary(edit=draws.with_nan_row),
        loose_rows={**_LOOSE_MIX, "streams": (3,), "x": (3,)},
    ),
)
