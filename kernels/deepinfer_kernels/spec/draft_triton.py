"""Rows of the drafter: where accepted context is kept, where a block lies, how sure it is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_ROWS = 256


@triton.jit(do_not_specialize=["num_rows"])
def _context(
    row_seq_ptr, row_offset_ptr, positions_ptr, valid_ptr, accepted_ptr, seq_slots_ptr, out_ptr,
    num_rows, ring, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    seq = tl.load(row_seq_ptr + row, mask=inside, other=0)
    offset = tl.load(row_offset_ptr + row, mask=inside, other=0)
    accepted = tl.load(accepted_ptr + seq, mask=inside, other=0)
    kept = tl.load(valid_ptr + row, mask=inside, other=0) != 0
    kept = kept & (offset < accepted) & (offset >= accepted - ring)
    position = tl.load(positions_ptr + row, mask=inside, other=0)
    slot = tl.load(seq_slots_ptr + seq, mask=inside, other=0) * ring + position % ring
    tl.store(out_ptr + row, tl.where(kept, slot, -1), mask=inside)


@triton.jit
def _block(
    anchors_ptr, seq_slots_ptr, floors_ptr, valid_ptr, positions_ptr, write_ptr, read_ptr,
    out_valid_ptr, block_size, window, ring, SEEN: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    anchor = tl.load(anchors_ptr + seq)
    valid = tl.load(valid_ptr + seq) != 0
    base = tl.load(seq_slots_ptr + seq) * ring
    column = tl.arange(0, SEEN)
    # Positions before the first are below every floor; the ring row must still be no negative one.
    seen = anchor + column - window
    present = valid & (seen >= tl.load(floors_ptr + seq))
    slot = tl.where(present, base + tl.maximum(seen, 0) % ring, -1)
    at = seq * block_size + row
    width = window + block_size
    tl.store(read_ptr + at * width + column, slot, mask=column < width)
    position = anchor + row
    present = valid & (position >= tl.load(floors_ptr + seq))
    tl.store(positions_ptr + at, tl.where(valid, position, 0))
    tl.store(write_ptr + at, tl.where(present, base + position % ring, -1))
    tl.store(out_valid_ptr + at, valid)


@triton.jit(do_not_specialize=["num_rows"])
def _probability(logit_ptr, temperature_ptr, out_ptr, num_rows, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    logit = tl.load(logit_ptr + row, mask=inside, other=0.0)
    temperature = tl.load(temperature_ptr + row, mask=inside, other=1.0)
    tl.store(out_ptr + row, 1.0 / (1.0 + tl.exp(-logit / temperature)), mask=inside)


def draft_context(
    row_seq: Tensor,
    row_offset: Tensor,
    positions: Tensor,
    valid: Tensor,
    num_accepted: Tensor,
    seq_slots: Tensor,
    *,
    ring: int,
) -> Tensor:
    """[T] int64 draft window rows of a step's rows; -1 for rows that are not final.

    Args:
        row_seq: [T] int64 request of each row.
        row_offset: [T] int64 index within the request's rows.
        positions: [T] int64.
        valid: [T] bool.
        num_accepted: [R] int64 rows of each request that are final.
        seq_slots: [R] int64 ring of each request.
        ring: rows of a ring.
    """
    out = torch.empty_like(positions)
    if out.numel():
        _context[(triton.cdiv(out.numel(), _ROWS),)](
            row_seq.contiguous(), row_offset.contiguous(), positions.contiguous(),
            valid.contiguous(), num_accepted.contiguous(), seq_slots.contiguous(), out,
            out.numel(), ring, ROWS=_ROWS,
        )  # fmt: skip
    return out


def draft_plan(
    anchor_positions: Tensor,
    seq_slots: Tensor,
    floors: Tensor,
    valid: Tensor,
    *,
    block_size: int,
    window: int,
    ring: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the draft block of every request lies and what its rows see.

    Args:
        anchor_positions: [R] int64 first position that is not in the cache.
        seq_slots: [R] int64 ring of each request.
        floors: [R] int64 first position with a draft row.
        valid: [R] bool.
        block_size: B rows of a block.
        window: W positions before the anchor.
        ring: rows of a ring, at least W + B.

    Returns:
        positions [R * B], write rows [R * B], read rows [R * B, W + B] int64, valid [R * B] bool.
    """
    num_seqs, width = anchor_positions.shape[0], window + block_size
    positions = anchor_positions.new_empty(num_seqs * block_size)
    write = torch.empty_like(positions)
    read = positions.new_empty((num_seqs * block_size, width))
    out_valid = torch.empty(num_seqs * block_size, dtype=torch.bool, device=positions.device)
    if positions.numel():
        _block[(num_seqs, block_size)](
            anchor_positions.contiguous(), seq_slots.contiguous(), floors.contiguous(),
            valid.contiguous(), positions, write, read, out_valid, block_size, window, ring,
            SEEN=triton.next_power_of_2(width),
        )  # fmt: skip
    return positions, write, read, out_valid


def probability(logit: Tensor, temperature: Tensor) -> Tensor:
    """sigmoid(logit / temperature) of [N] fp32 each."""
    out = torch.empty_like(logit)
    if out.numel():
        _probability[(triton.cdiv(out.numel(), _ROWS),)](
            logit.contiguous(), temperature.contiguous(), out, out.numel(), ROWS=_ROWS
        )
    return out


def draft_plan_truth(
    anchor: int, slot: int, floor: int, *, block_size: int, window: int, ring: int
) -> tuple[list[int], list[int], list[int]]:
    """Positions, write rows and read rows (the same for every row) of one valid request."""
    positions = [anchor + row for row in range(block_size)]
    seen = range(anchor - window, anchor + block_size)
    rows = [slot * ring + place % ring if place >= floor else -1 for place in seen]
    return positions, rows[window:], rows


_ROW_POINTERS = {
    "row_seq_ptr": "*i64", "row_offset_ptr": "*i64", "positions_ptr": "*i64", "valid_ptr": "*i1",
}  # fmt: skip
COMPILE_CASES = (
    CompileCase(
        "_context",
        {
            **_ROW_POINTERS, "accepted_ptr": "*i64", "seq_slots_ptr": "*i64", "out_ptr": "*i64",
            "num_rows": "i32", "ring": "i32",
        },
        {"ROWS": _ROWS},
    ),
    CompileCase(
        "_block",
        {
            "anchors_ptr": "*i64", "seq_slots_ptr": "*i64", "floors_ptr": "*i64",
            "valid_ptr": "*i1", "positions_ptr": "*i64", "write_ptr": "*i64", "read_ptr": "*i64",
            "out_valid_ptr": "*i1", "block_size": "i32", "window": "i32", "ring": "i32",
        },
        {"SEEN": 256},
    ),
    CompileCase(
        "_probability",
        {"logit_ptr": "*fp32", "temperature_ptr": "*fp32", "out_ptr": "*fp32", "num_rows": "i32"},
        {"ROWS": _ROWS},
    ),
)  # fmt: skip
