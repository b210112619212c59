"""Samples of the norm family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.numerics import Numerics
from deepinfer.device.ops.norm import rmsnorm
from deepinfer.device.samples import draws
from deepinfer.device.samples.registry import (
    Arguments,
    Builder,
    Sample,
    declare,
    declare_sample,
)


def _case(
    *shape: int, eps: float = 1e-20, edit: Callable[[Tensor], Tensor] = torch.clone
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        x = draws.normal(generator, *shape, dtype=draws.activation_dtype(numerics))
        return {"x": edit(x), "weight": draws.norm_weight(generator, shape[-1]), "eps": eps}

    return build


def _zero_row(x: Tensor) -> Tensor:
    x = x.clone()
    x[1] = 0.0
    return x


declare(
    rmsnorm,
    {
        "control": _case(5, 96),
        "n=0": _case(0, 96),
        "n=1": _case(1, 96),
        "n=17": _case(17, 96),
        "width=1": _case(5, 1),
        "width=not-multiple-of-32": _case(5, 70),
        "three-dimensions": _case(2, 3, 32),
        "eps=1e-2": _case(5, 96, eps=1e-2),
        "strided": _case(5, 96, edit=draws.strided),
        "zero-row": _case(5, 96, edit=_zero_row),
        "outlier-channel": _case(5, 96, edit=draws.with_outlier),
        "tiny-values": _case(5, 96, edit=lambda x: x * 2.0**-25),
    },
)
declare_sample(
    rmsnorm,
    Sample("nan-row", _case(5, 96, edit=draws.with_nan_row), loose_rows={"out": (4,)}),
)
