"""Reference of the compress family."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import compress
from deepinfer_reference.gemm import in_whole_vectors


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
    if values_gates.shape[0] == 0:  # padding entries have no row to stand in for them
        return like.new_zeros((emit_rows.shape[0], ring.shape[1] // 2))
    rows = emit_rows.clamp_min(0)
    before = previous_row.index_select(0, rows)
    held = ring.index_select(0, ring_read.index_select(0, rows))
    in_step = values_gates.index_select(0, before.clamp_min(0))
    first = torch.where((before >= 0).unsqueeze(1), in_step, held)
    second = values_gates.index_select(0, rows)
    width = ring.shape[1] // 2
    gate_0, gate_1 = first[:, width:], second[:, width:]
    top = torch.maximum(gate_0, gate_1)
    # Not torch.softmax over the pair: it rounds differently in the tail of the channels.
    part_0 = in_whole_vectors(torch.exp, gate_0 - top)
    part_1 = in_whole_vectors(torch.exp, gate_1 - top)
    total = part_0 + part_1
    pooled = part_0 / total * first[:, :width] + part_1 / total * second[:, :width]
    kept = ring_write >= 0
    ring[ring_write[kept]] = values_gates[kept]
    pooled = pooled.masked_fill(emit_rows.unsqueeze(1) < 0, 0.0)
    return pooled.to(like.dtype)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(compress.compress_pair)(compress_pair)
