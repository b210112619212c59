"""Pooling pairs of tokens: a softmax over two gates per channel, and the ring of waiting rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase


@triton.jit
def _pool(
    rows_ptr, previous_ptr, ring_read_ptr, emit_ptr, ring_ptr, out_ptr, width, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(emit_ptr + entry)
    inside = inside & (row >= 0)
    row = tl.maximum(row, 0)
    before = tl.load(previous_ptr + row)
    held = tl.load(ring_read_ptr + row)
    in_step = inside & (before >= 0)
    in_ring = inside & (before < 0)
    first = rows_ptr + before * 2 * width
    value_0 = tl.load(first + column, mask=in_step, other=0.0)
    gate_0 = tl.load(first + width + column, mask=in_step, other=0.0)
    first = ring_ptr + held * 2 * width
    value_0 += tl.load(first + column, mask=in_ring, other=0.0)
    gate_0 += tl.load(first + width + column, mask=in_ring, other=0.0)
    second = rows_ptr + row * 2 * width
    value_1 = tl.load(second + column, mask=inside, other=0.0)
    gate_1 = tl.load(second + width + column, mask=inside, other=0.0)
    top = tl.maximum(gate_0, gate_1)
    part_0 = tl.exp(gate_0 - top)
    part_1 = tl.exp(gate_1 - top)
    total = part_0 + part_1
    pooled = part_0 / total * value_0 + part_1 / total * value_1
    pooled = tl.where(inside, pooled, 0.0)
    out = out_ptr + entry * width + column
    tl.store(out, pooled.to(out_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def _keep(rows_ptr, ring_write_ptr, ring_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(ring_write_ptr + row)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < width
        values = tl.load(rows_ptr + row * width + column, mask=inside)
        tl.store(ring_ptr + slot * width + column, values, mask=inside)


def compress_pair(
    rows: Tensor,
    previous_row: Tensor,
    ring_read: Tensor,
    ring_write: Tensor,
    emit_rows: Tensor,
    *,
    ring: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Pool the pairs that end in this step, then keep the last rows; changes `ring` in place.

    Args:
        rows: [T, 2 C] fp32, value and gate of every row.
        previous_row: [T] int64 row of the position before; -1: in the ring.
        ring_read: [T] int64 ring row of the position before.
        ring_write: [T] int64 ring row that keeps this row; -1 skips.
        emit_rows: [E] int64 second row of each pair; -1 is padding and gives zeros.
        ring: [slots, 2 C] fp32.
        dtype: of the result.

    Returns:
        [E, C].
    """
    rows = rows.contiguous()
    width = ring.shape[1] // 2
    num_entries, num_rows = emit_rows.shape[0], rows.shape[0]
    if num_rows == 0:
        return torch.zeros((num_entries, width), dtype=dtype, device=rows.device)
    out = torch.empty((num_entries, width), dtype=dtype, device=rows.device)
    block = triton.next_power_of_2(width)
    # Two launches: a row of the ring may be read by one pair and written by a later token.
    if num_entries:
        _pool[(num_entries,)](
            rows, previous_row.contiguous(), ring_read.contiguous(), emit_rows.contiguous(), ring,
            out, width, BLOCK=block,
        )  # fmt: skip
    _keep[(num_rows,)](rows, ring_write.contiguous(), ring, 2 * width, BLOCK=2 * block)
    return out


def compress_pair_truth(first: Tensor, second: Tensor) -> Tensor:
    """[E, C] pooled values of rows [E, 2 C] and the rows after them, in plain torch."""
    width = first.shape[1] // 2
    gates = torch.stack((first[:, width:], second[:, width:])).double()
    values = torch.stack((first[:, :width], second[:, :width])).double()
    return (torch.softmax(gates, dim=0) * values).sum(0).float()


COMPILE_CASES = (
    CompileCase(
        "_pool",
        {
            "rows_ptr": "*fp32", "previous_ptr": "*i64", "ring_read_ptr": "*i64",
            "emit_ptr": "*i64", "ring_ptr": "*fp32", "out_ptr": "*bf16", "width": "i32",
        },
        {"BLOCK": 512},
    ),
    CompileCase(
        "_keep",
        {"rows_ptr": "*fp32", "ring_write_ptr": "*i64", "ring_ptr": "*fp32", "width": "i32"},
        {"BLOCK": 1024},
    ),
)  # fmt: skip
