"""Truths of the quant family."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.samples.canonical import (
    CanonicalEmbedding,
    CanonicalGrouped,
    CanonicalLinear,
)
from deepinfer.device.weights import StoredTensor
from deepinfer_conformance.naive import numbers, stored
from deepinfer_conformance.naive.stored import Matrix

Group = Callable[[list[float]], tuple[list[int], int]]


def product(rows: Matrix, weight: Matrix) -> Matrix:
    """rows @ weight^T, each entry summed without rounding."""
    return [
        [math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in weight]
        for row in rows
    ]


def quantised_product(rows: Matrix, weight: StoredTensor, *, normative: bool) -> Matrix:
    """Product with one matrix; its input is rounded first where weight and mode ask for it."""
    if normative and stored.is_quantized(weight):
        rows = [numbers.a8_round_trip(row) for row in rows]
    return product(rows, stored.weight(weight))


def _side_by_side(blocks: list[Matrix]) -> Matrix:
    return [[v for part in parts for v in part] for parts in zip(*blocks, strict=True)]


def _tensor(rows: Matrix, num_columns: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), num_columns)


def embed(ids: Tensor, table: CanonicalEmbedding) -> Tensor:
    """Rows by id; float64 stands for fp32 unless the caller's mode is bf16."""
    rows = stored.weight(table.table)
    return _tensor([rows[token] for token in ids.tolist()], table.table.shape[1])


def linear(x: Tensor, weight: CanonicalLinear) -> Tensor:
    """Part by part; [T, sum N] in x's dtype."""
    rows, normative = stored.matrix(x), numbers.is_normative(x)
    parts = [quantised_product(rows, part, normative=normative) for part in weight.parts]
    width = sum(part.shape[0] for part in weight.parts)
    return _tensor(_side_by_side(parts), width).to(x.dtype)


def linear_f32(x: Tensor, weight: CanonicalLinear) -> Tensor:
    """Part by part, no rounding; [T, sum N] float64."""
    rows = stored.matrix(x)
    parts = [product(rows, stored.weight(part)) for part in weight.parts]
    return _tensor(_side_by_side(parts), sum(part.shape[0] for part in weight.parts))


def grouped_linear(x: Tensor, weight: CanonicalGrouped) -> Tensor:
    """Group by group; [T, G, N] in x's dtype."""
    values = [
        [numbers.to_activation(value, x) for value in row] for row in stored.weight(weight.weight)
    ]
    height = len(values) // weight.num_groups
    rows: list[Matrix] = []
    for token in x.double().tolist():
        groups = []
        for group, row in enumerate(token):
            block = values[group * height : (group + 1) * height]
            groups.append(product([row], block)[0])
        rows.append(groups)
    shape = (x.shape[0], weight.num_groups, height)
    return torch.tensor(rows, dtype=torch.float64).view(shape).to(x.dtype)


def _quantise(x: Tensor, length: int, group_of: Group) -> tuple[list[list[int]], list[list[int]]]:
    """Codes and scale bytes of every row."""
    codes: list[list[int]] = []
    scales: list[list[int]] = []
    for row in stored.matrix(x.reshape(-1, x.shape[-1])):
        parts = [group_of(row[start : start + length]) for start in range(0, len(row), length)]
        codes.append([code for part, _ in parts for code in part])
        scales.append([scale for _, scale in parts])
    return codes, scales


def _bytes(rows: list[list[int]], shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(shape)


def _nibbles(rows: list[list[int]]) -> list[list[int]]:
    return [[row[at] + 16 * row[at + 1] for at in range(0, len(row), 2)] for row in rows]


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Group by group of 32."""
    codes, scales = _quantise(x, 32, numbers.a8_group)
    lead, width = tuple(x.shape[:-1]), x.shape[-1]
    data = _bytes(codes, (*lead, width)).view(torch.float8_e4m3fn)
    return data, _bytes(scales, (*lead, width // 32))


def quantize_q4_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Group by group of 32, two codes a byte."""
    codes, scales = _quantise(x, 32, numbers.q4_ue8m0_group)
    lead, width = tuple(x.shape[:-1]), x.shape[-1]
    return _bytes(_nibbles(codes), (*lead, width // 2)), _bytes(scales, (*lead, width // 32))


def quantize_q4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Group by group of 16, two codes a byte."""
    codes, scales = _quantise(x, 16, numbers.q4_e4m3_group)
    lead, width = tuple(x.shape[:-1]), x.shape[-1]
    data = _bytes(_nibbles(codes), (*lead, width // 2))
    return data, _bytes(scales, (*lead, width // 16)).view(torch.float8_e4m3fn)
