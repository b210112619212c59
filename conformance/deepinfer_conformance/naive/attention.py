"""Truths of the attention family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.device.samples.canonical import CanonicalCache, CanonicalVector
from deepinfer_conformance.naive import numbers, stored


def rotated(row: list[float], angles: list[float], *, inverse: bool, like: Tensor) -> list[float]:
    """One row with its tail turned as complex numbers, rounded to `like`'s dtype.

    Args:
        row: N values.
        angles: R / 2 cosines, then R / 2 sines.
        inverse: turn back.
        like: a tensor of the dtype to round to.
    """
    half = len(angles) // 2
    start = len(row) - 2 * half
    result = row[:start]
    for pair in range(half):
        factor = complex(angles[pair], -angles[half + pair] if inverse else angles[half + pair])
        turned = complex(row[start + 2 * pair], row[start + 2 * pair + 1]) * factor
        result += [turned.real, turned.imag]
    return result[:start] + [numbers.to_activation(value, like) for value in result[start:]]


def rope(x: Tensor, positions: Tensor, rope_table: Tensor, *, inverse: bool) -> Tensor:
    """Token by token, head by head; [T, H, N] in x's dtype."""
    table = stored.matrix(rope_table)
    rows = [
        [rotated(head, table[position], inverse=inverse, like=x) for head in heads]
        for heads, position in zip(x.double().tolist(), positions.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(x.shape).to(x.dtype)


def _attend(
    query: list[float], keys: list[list[float]], *, sink: float, scale: float, like: Tensor
) -> list[float]:
    if not keys:
        return [0.0] * len(query)
    scores = [scale * math.fsum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    top = max(scores)
    shares = [math.exp(score - top) for score in scores]
    total = math.fsum(shares) + math.exp(sink - top)
    rounded = [numbers.to_activation(share, like) for share in shares]
    return [
        math.fsum(share * key[at] for share, key in zip(rounded, keys, strict=True)) / total
        for at in range(len(query))
    ]


def sparse_attention(
    q: Tensor,
    window: CanonicalCache,
    window_slots: Tensor,
    compressed: CanonicalCache | None,
    compressed_slots: Tensor | None,
    *,
    sink: CanonicalVector,
    scale: float,
) -> Tensor:
    """Row by row, head by head; [T, H, C] in q's dtype."""
    sinks = stored.vector(sink)
    recent = stored.matrix(window.values)
    pooled = [] if compressed is None else stored.matrix(compressed.values)
    rows = []
    for token, heads in enumerate(q.double().tolist()):
        keys = [recent[slot] for slot in window_slots[token].tolist() if slot >= 0]
        if compressed_slots is not None:
            keys += [pooled[slot] for slot in compressed_slots[token].tolist() if slot >= 0]
        rows.append(
            [
                _attend(head, keys, sink=sinks[index], scale=scale, like=q)
                for index, head in enumerate(heads)
            ]
        )
    return torch.tensor(rows, dtype=torch.float64).view(q.shape).to(q.dtype)
