"""Truths of the compress family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_conformance.naive.stored import matrix


def compress_pair(
    values_gates: Tensor,
    previous_row: Tensor,
    ring_read: Tensor,
    ring_write: Tensor,
    emit_rows: Tensor,
    *,
    ring: Tensor,
    like: Tensor,
) -> Tensor:
    """Entry by entry, channel by channel; padding entries are zeros."""
    rows, before = matrix(values_gates), matrix(ring)
    width = ring.shape[1] // 2
    entries: list[list[float]] = []
    for second in emit_rows.tolist():
        if second < 0:
            entries.append([0.0] * width)
            continue
        first = int(previous_row[second])
        older = rows[first] if first >= 0 else before[int(ring_read[second])]
        newer = rows[second]
        entry = []
        for channel in range(width):
            # Softmax of two gates: a logistic function of their difference.
            gap = newer[width + channel] - older[width + channel]
            share = 1.0 / (1.0 + math.exp(gap)) if gap < 700.0 else 0.0
            entry.append(share * older[channel] + (1.0 - share) * newer[channel])
        entries.append(entry)
    for row, slot in enumerate(ring_write.tolist()):
        if slot >= 0:
            ring[slot] = values_gates[row]
    shape = (len(entries), width)
    return torch.tensor(entries, dtype=torch.float64).view(shape).to(like.dtype)
