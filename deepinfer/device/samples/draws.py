"""Random tensors, weights, caches and tables that samples are drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device import formats
from deepinfer.device.backend import CacheKind
from deepinfer.device.numerics import Numerics
from deepinfer.device.samples.canonical import CanonicalCache, CanonicalVector
from deepinfer.device.weights import StoredTensor, WeightFormat, stored_from_float

OUTLIER = 32.0
"""Factor of outlier channels, as seen in residual streams of trained models."""


def activation_dtype(numerics: Numerics) -> torch.dtype:
    """Dtype of activations: fp32 in exact, bf16 in normative numerics."""
    return torch.float32 if numerics is Numerics.EXACT else torch.bfloat16


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values [*shape]."""
    return torch.randn(shape, generator=generator).to(dtype)


def integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    """Uniform int64 in [0, high) of the given shape."""
    return torch.randint(high, shape, generator=generator)


def strided(x: Tensor) -> Tensor:
    """The same values with a gap after every element: no dimension is contiguous."""
    if x.dim() == 0:
        return x
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    wide[..., ::2] = x
    return wide[..., ::2]


def with_outlier(x: Tensor) -> Tensor:
    """x with its channel 3 multiplied by the outlier factor."""
    scaled = x.clone()
    scaled[..., 3] *= OUTLIER
    return scaled


def with_spread_groups(x: Tensor) -> Tensor:
    """x [T, N] with magnitudes that change from row to row and every 16 columns."""
    groups = torch.arange(-(-x.shape[1] // 16))
    powers = (groups * 5 + torch.arange(x.shape[0]).unsqueeze(1)) % 4 - 2
    factors = powers.float().exp2().repeat_interleave(16, 1)[:, : x.shape[1]]
    return (x.float() * factors).to(x.dtype)


def with_one_nan(x: Tensor) -> Tensor:
    """x with a NaN in its second row: a row that went wrong must not come out as numbers."""
    x = x.clone()
    x[1, x.shape[1] // 2] = float("nan")
    return x


def with_nan_row(x: Tensor) -> Tensor:
    """x with NaN in its last row, as padding may hold."""
    padded = x.clone()
    padded[-1] = float("nan")
    return padded


def matrix(generator: torch.Generator, rows: int, cols: int, fmt: WeightFormat) -> StoredTensor:
    """A weight [rows, cols] of variance about 1 / cols, stored in `fmt`.

    Groups with a scale of their own differ in magnitude: a scale read from the wrong place would
    not show otherwise.
    """
    values = normal(generator, rows, cols) * cols**-0.5
    group_rows = {WeightFormat.FP8_TILE32: 32, WeightFormat.MXFP4: 1}.get(fmt)
    if group_rows is not None:
        groups = -(-rows // group_rows), -(-cols // 32)
        factors = torch.randint(-2, 3, groups, generator=generator).float().exp2()
        spread = factors.repeat_interleave(group_rows, 0).repeat_interleave(32, 1)
        values = values * spread[:rows, :cols]
    return stored_from_float(values, fmt)


def vector(value: Tensor) -> CanonicalVector:
    """A small fp32 parameter."""
    return CanonicalVector(stored_from_float(value, WeightFormat.F32))


def norm_weight(generator: torch.Generator, width: int) -> CanonicalVector:
    """Norm weights [width] around 1."""
    return vector(1.0 + 0.2 * normal(generator, width))


def rope_table(num_positions: int, rotated: int) -> Tensor:
    """[num_positions, rotated] fp32: cos of the pairs, then sin."""
    frequency = 1e4 ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def representable(values: Tensor, kind: CacheKind, numerics: Numerics) -> Tensor:
    """fp32 values [..., width] as a record of that kind gives them back."""
    if numerics is Numerics.EXACT:
        return values.float()
    if kind is CacheKind.WINDOW:
        return formats.round_trip_a8(values)
    if kind is CacheKind.COMPRESSED:
        return formats.round_trip_q4_e4m3(values)
    return formats.round_trip_q4_ue8m0(values)


def cache(
    generator: torch.Generator,
    numerics: Numerics,
    *,
    kind: CacheKind,
    num_rows: int,
    width: int,
    poisoned: tuple[int, ...] = (),
) -> CanonicalCache:
    """A cache of rows that its record holds exactly; its groups have scales of their own."""
    groups = num_rows, -(-width // 16)
    factors = torch.randint(-1, 2, groups, generator=generator).float().exp2()
    values = normal(generator, num_rows, width) * factors.repeat_interleave(16, 1)[:, :width]
    values = representable(values, kind, numerics)
    return CanonicalCache(kind, values, poisoned)
