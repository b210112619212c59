"""Weights are packed without changing a value, in the layouts of the MX operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.device.errors import ConfigError
from deepinfer.device.weights import StoredTensor, WeightFormat, stored_from_float
from deepinfer_ascend950.emulation.mx_format import spread_scales, unpacked_e2m1
from deepinfer_ascend950.packing import (
    aligned_inner,
    pack_expert_matrices,
    pack_float_linear,
    pack_mx_linear,
    paired_scales,
)

CPU = torch.device("cpu")
QUANTIZED = [fmt for fmt in WeightFormat if fmt.is_quantized]


def _stored(rows: int, cols: int, fmt: WeightFormat, seed: int = 0) -> StoredTensor:
    generator = torch.Generator().manual_seed(seed)
    return stored_from_float(torch.randn(rows, cols, generator=generator), fmt)


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_packed_linear_holds_the_stored_values(fmt: WeightFormat) -> None:
    parts = [_stored(40, 96, fmt), _stored(33, 96, fmt, seed=1)]
    packed = pack_mx_linear(parts, CPU)
    values = packed.codes.float() * spread_scales(packed.scales, 96)
    assert torch.equal(values, torch.cat([part.dequantize() for part in parts]))
    assert packed.scales.shape == (73, 2, 2)
    assert (packed.in_features, packed.out_features) == (96, 73)


def test_scales_of_a_tile_are_repeated_for_its_rows() -> None:
    stored = _stored(64, 64, WeightFormat.FP8_TILE32)
    assert stored.scale is not None
    packed = pack_mx_linear([stored], CPU)
    for row in (0, 31, 32, 63):
        assert torch.equal(packed.scales[row, 0], stored.scale[row // 32])


@pytest.mark.parametrize("fmt", [WeightFormat.MXFP4, WeightFormat.FP8_TILE32])
def test_packed_experts_hold_the_stored_values_and_zeros(fmt: WeightFormat) -> None:
    experts = [(_stored(48, 96, fmt, e), _stored(48, 96, fmt, 9 + e)) for e in range(3)]
    packed = pack_expert_matrices(experts, exact=False, device=CPU)
    assert packed.scales is not None
    codes = unpacked_e2m1(packed.data) if fmt is WeightFormat.MXFP4 else packed.data.float()
    values = codes * spread_scales(packed.scales, codes.shape[-1])
    assert values.shape == (3, 128, 128)
    assert packed.out_features == 96
    for expert, parts in enumerate(experts):
        expected = torch.cat([part.dequantize() for part in parts])
        assert torch.equal(values[expert, :96, :96], expected)
    assert not values[:, 96:].any()
    assert not values[:, :, 96:].any()


def test_experts_of_two_formats_are_refused() -> None:
    mixed = [(_stored(32, 32, WeightFormat.MXFP4),), (_stored(32, 32, WeightFormat.BF16),)]
    with pytest.raises(ConfigError, match=r"formats \['bf16', 'mxfp4'\]"):
        pack_expert_matrices(mixed, exact=False, device=CPU)


@pytest.mark.parametrize(
    ("fmt", "exact", "dtype"),
    [
        (WeightFormat.BF16, False, torch.bfloat16),
        (WeightFormat.BF16, True, torch.float32),
        (WeightFormat.F32, False, torch.float32),
    ],
)
def test_unquantised_weights_keep_their_precision(
    fmt: WeightFormat, exact: bool, dtype: torch.dtype
) -> None:
    stored = _stored(8, 16, fmt)
    packed = pack_float_linear([stored], exact=exact, device=CPU)
    assert packed.matrix.dtype is dtype
    assert torch.equal(packed.matrix_f32, stored.dequantize())


def test_scales_stand_in_pairs() -> None:
    scales: Tensor = torch.arange(6, dtype=torch.uint8).view(2, 3)
    assert paired_scales(scales).tolist() == [[[0, 1], [2, 0]], [[3, 4], [5, 0]]]


@pytest.mark.parametrize(("inner", "aligned"), [(32, 64), (64, 64), (96, 128)])
def test_inner_dimension_is_filled_with_zeros(inner: int, aligned: int) -> None:
    x = aligned_inner(torch.ones(2, inner))
    assert x.shape == (2, aligned)
    assert x.sum() == 2 * inner
