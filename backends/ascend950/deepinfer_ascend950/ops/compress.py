"""Compress family."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import compress


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
    width = ring.shape[1] // 2
    num_rows = values_gates.shape[0]
    if num_rows == 0:
        return like.new_zeros((emit_rows.shape[0], width))
    rows = emit_rows.clamp_min(0)
    before = previous_row.index_select(0, rows)
    held = ring.index_select(0, ring_read.index_select(0, rows))
    in_step = values_gates.index_select(0, before.clamp_min(0))
    first = torch.where((before >= 0).unsqueeze(1), in_step, held)
    second = values_gates.index_select(0, rows)
    gates = torch.stack((first[:, width:], second[:, width:]))
    values = torch.stack((first[:, :width], second[:, :width]))
    pooled = (torch.softmax(gates, dim=0) * values).sum(0)
    _write_ring(ring, ring_write, values_gates)
    return pooled.masked_fill(emit_rows.unsqueeze(1) < 0, 0.0).to(like.dtype)


def _write_ring(ring: Tensor, ring_write: Tensor, values: Tensor) -> None:
    """Put values [T, 2 C] where ring_write [T] says; -1 skips.

    The ring has no row to spare for what is skipped, so every ring row looks for its writer.
    """
    num_slots = ring.shape[0]
    target = torch.where(ring_write < 0, num_slots, ring_write)
    number = torch.arange(values.shape[0], device=ring.device)
    writer = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=ring.device)
    writer = writer.scatter(0, target, number)[:num_slots]
    written = values.index_select(0, writer.clamp_min(0))
    ring.copy_(torch.where((writer >= 0).unsqueeze(1), written, ring))


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(
        compress.compress_pair,
        reason="torch: the custom compressor operators have V4 semantics (position term, overlap)",
        layout="fp32, one cast",
    )(compress_pair)
