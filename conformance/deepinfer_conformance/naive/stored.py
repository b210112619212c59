"""Canonical weights read byte by byte into float64 lists."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.samples.canonical import CanonicalVector
from deepinfer.device.weights import StoredTensor, WeightFormat
from deepinfer_conformance.naive.numbers import e2m1_value, e4m3_value, ue8m0_value

Matrix = list[list[float]]


def matrix(x: Tensor) -> Matrix:
    """Rows of a 2-D float tensor."""
    rows: Matrix = x.double().tolist()
    return rows


def vector(value: CanonicalVector | Tensor) -> list[float]:
    """Values of a 1-D parameter."""
    data = value if isinstance(value, Tensor) else value.value.data
    values: list[float] = data.double().tolist()
    return values


def parameter(value: CanonicalVector) -> Matrix:
    """Rows of a 2-D fp32 parameter."""
    return matrix(value.value.data)


def weight(stored: StoredTensor) -> Matrix:
    """Values of a stored matrix, decoded from its bytes."""
    if stored.format in (WeightFormat.F32, WeightFormat.BF16):
        return matrix(stored.data)
    assert stored.scale is not None
    scales: list[list[int]] = stored.scale.tolist()
    codes: list[list[int]] = stored.data.view(torch.uint8).tolist()
    if stored.format is WeightFormat.MXFP4:
        return [
            [
                e2m1_value(byte >> (4 * half) & 15) * ue8m0_value(scale[(2 * at + half) // 32])
                for at, byte in enumerate(row)
                for half in (0, 1)
            ]
            for row, scale in zip(codes, scales, strict=True)
        ]
    tile_rows = 32 if stored.format is WeightFormat.FP8_TILE32 else 1
    return [
        [
            e4m3_value(code) * ue8m0_value(scales[n // tile_rows][k // 32])
            for k, code in enumerate(row)
        ]
        for n, row in enumerate(codes)
    ]


def is_quantized(stored: StoredTensor) -> bool:
    """Whether activations that meet this weight are quantised in normative numerics."""
    return stored.format in (
        WeightFormat.FP8_TILE32,
        WeightFormat.MXFP4,
        WeightFormat.FP8_ROW32,
    )
