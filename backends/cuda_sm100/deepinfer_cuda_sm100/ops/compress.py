"""Compress family on Triton kernels."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import compress
from deepinfer_kernels.compress import pair_triton


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
    return pair_triton.compress_pair(
        values_gates, previous_row, ring_read, ring_write, emit_rows, ring=ring, dtype=like.dtype
    )


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(compress.compress_pair, reason=reason)(compress_pair)
