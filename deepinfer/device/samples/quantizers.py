"""Inputs for the quantisers: ties, limits, floors and zeros of each format."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.numerics import Numerics
from deepinfer.device.samples import draws
from deepinfer.device.samples.registry import Arguments, Builder

Edit = Callable[[Tensor], Tensor]

_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0)
# Halfway between neighbouring e4m3 codes: subnormal, at both ends of a binade, near the maximum.
_E4M3_TIES = (2.0**-10, 3 * 2.0**-10, 1.0625, 1.1875, 1.9375, 17.0, 19.0, 432.0, 448.0)


def _random(*shape: int, edit: Edit = torch.clone, dtype: torch.dtype | None = None) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        kind = dtype or draws.activation_dtype(numerics)
        return {"x": edit(draws.normal(generator, *shape, dtype=kind))}

    return build


def _groups(*groups: tuple[float, ...]) -> Builder:
    """One row per group, filled to 32 values with the group's own in turn, signs alternating."""

    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        rows = [[group[i % len(group)] * (-1.0) ** (i % 3) for i in range(32)] for group in groups]
        return {"x": torch.tensor(rows, dtype=draws.activation_dtype(numerics))}

    return build


def _zero_groups(x: Tensor) -> Tensor:
    x = x.clone()
    x[1] = 0.0
    x[2, :32] = 0.0
    return x


def _negative_zero(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, ::5] = -0.0
    return x


def _scaled(factor: float) -> Edit:
    return lambda x: x * factor


def _powers(first: int, last: int) -> Builder:
    """Rows whose largest value is exactly 2^e."""
    return _groups(*((2.0**e, 0.3 * 2.0**e, 0.7 * 2.0**e) for e in range(first, last)))


_SHARED: dict[str, Builder] = {
    "control": _random(4, 96),
    "n=0": _random(0, 64),
    "n=1": _random(1, 32),
    "three-dimensions": _random(2, 3, 32),
    "x=f32": _random(4, 96, dtype=torch.float32),
    "x=bf16": _random(4, 96, dtype=torch.bfloat16),
    "strided": _random(4, 64, edit=draws.strided),
    "zero-groups": _random(4, 96, edit=_zero_groups),
    "negative-zero": _random(4, 96, edit=_negative_zero),
    "outlier-channel": _random(4, 96, edit=draws.with_outlier),
    "amax=power-of-two": _powers(-6, 8),
    "huge": _random(4, 64, edit=_scaled(2.0**120)),
    "subnormal": _random(4, 64, edit=_scaled(2.0**-128)),
}
A8: dict[str, Builder] = {
    **_SHARED,
    "e4m3-ties": _groups(_E4M3_TIES, tuple(2.0**7 * t for t in _E4M3_TIES)),
    "amax=e4m3-maximum": _groups((448.0, 447.0, 1.0), (449.0, 447.0, 1.0), (464.0, 2.0)),
    "amax=around-floor": _groups((0.9e-4, 1e-5), (1e-4, 1e-5), (1.1e-4, 1e-5), (2.0**-40,)),
    "seventeen-groups": _random(1, 17 * 32),
}
Q4_UE8M0: dict[str, Builder] = {
    **_SHARED,
    "e2m1-ties": _groups(_E2M1_TIES, tuple(2.0**-5 * t for t in _E2M1_TIES)),
    "amax=6": _groups((6.0, 5.99, 1.0), (6.03125, 5.0, 1.0), (5.96875, 5.0, 0.25)),
    "scale=smallest": _groups((6.0 * 2.0**-126, 2.0**-126), (2.0**-126, 2.0**-127), (2.0**-130,)),
}
Q4_E4M3: dict[str, Builder] = {
    **_SHARED,
    "e2m1-ties": _groups(_E2M1_TIES, tuple(0.75 * t for t in _E2M1_TIES)),
    "one-group": _random(3, 16),
    "three-groups": _random(3, 48),
    "amax=scale-maximum": _groups((2688.0, 300.0, 1.0), (2700.0, 500.0), (9000.0, 2000.0, 10.0)),
    "amax=around-floor": _groups(
        (6.0 * 2.0**-9, 2.0**-9), (5.0 * 2.0**-9, 2.0**-10), (9.0 * 2.0**-9,), (10.0 * 2.0**-9,)
    ),
}
