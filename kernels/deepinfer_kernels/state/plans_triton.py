"""Everything per row that a step derives from per-request numbers: integers, read on no host.

Requests of a step fit into one block, so that every program finds its prefix sums itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_ROWS = 16


class Rows(NamedTuple):
    """Request, offset, position, validity of each row [T], and query starts [R + 1]."""

    row_seq: Tensor
    row_offset: Tensor
    positions: Tensor
    valid: Tensor
    query_starts: Tensor


class Window(NamedTuple):
    """Rows written [T] and read [T, W]; history rows [R * (W - 1)] and commits [T]."""

    write: Tensor
    read: Tensor
    history_from: Tensor
    history_to: Tensor
    commit_from: Tensor
    commit_to: Tensor


class Compressed(NamedTuple):
    """Emitted entries [E] and what each row sees, reads and keeps [T]."""

    emit_rows: Tensor
    entries: Tensor
    positions: Tensor
    slots: Tensor
    visible: Tensor
    previous_row: Tensor
    ring_read: Tensor
    ring_write: Tensor


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _layout(
    query_lens_ptr, context_lens_ptr, row_seq_ptr, row_offset_ptr, positions_ptr, valid_ptr,
    starts_ptr, num_rows, num_seqs, ROWS: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    seq = tl.arange(0, SEQS)
    lens = tl.load(query_lens_ptr + seq, mask=seq < num_seqs, other=0)
    ends = tl.cumsum(lens, axis=0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    passed = (ends[None, :] <= row[:, None]) & (seq < num_seqs)[None, :]
    owner = tl.minimum(tl.sum(passed.to(tl.int32), axis=1), num_seqs - 1)
    start = tl.sum(tl.where(seq[None, :] < owner[:, None], lens[None, :], 0), axis=1)
    valid = row < tl.sum(lens, axis=0)
    offset = tl.where(valid, row - start, 0)
    context = tl.load(context_lens_ptr + owner, mask=inside, other=0)
    tl.store(row_seq_ptr + row, owner.to(tl.int64), mask=inside)
    tl.store(row_offset_ptr + row, offset, mask=inside)
    tl.store(positions_ptr + row, tl.where(valid, context + offset, 0), mask=inside)
    tl.store(valid_ptr + row, valid, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr + seq, ends - lens, mask=seq < num_seqs)
        tl.store(starts_ptr + num_seqs, tl.sum(lens, axis=0))


@triton.jit
def _window_rows(
    row_seq_ptr, row_offset_ptr, positions_ptr, valid_ptr, starts_ptr, query_lens_ptr,
    context_lens_ptr, seq_slots_ptr, floors_ptr, write_ptr, read_ptr, commit_ptr, window, ring,
    PREFILL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    back = tl.arange(0, WINDOW)
    seq = tl.load(row_seq_ptr + row)
    valid = tl.load(valid_ptr + row) != 0
    position = tl.load(positions_ptr + row)
    ring_base = tl.load(seq_slots_ptr + seq) * ring
    ring_row = ring_base + position % ring
    key = position + back - (window - 1)
    readable = valid & (key >= tl.load(floors_ptr + seq))
    if PREFILL:
        # Workspace of a request: window - 1 rows of history, then its chunk.
        chunk = tl.load(starts_ptr + seq) + (seq + 1) * (window - 1)
        offset = tl.load(row_offset_ptr + row)
        target = chunk + offset
        source = chunk - tl.load(context_lens_ptr + seq) + key
        kept = valid & (offset >= tl.load(query_lens_ptr + seq) - ring)
        tl.store(commit_ptr + row, tl.where(kept, ring_row, -1))
    else:
        target = ring_row
        source = ring_base + (key + ring) % ring
    tl.store(write_ptr + row, tl.where(valid, target, -1))
    read = tl.where(readable, source, -1)
    tl.store(read_ptr + row * window + back, read, mask=back < window)


@triton.jit
def _history(
    starts_ptr, query_lens_ptr, context_lens_ptr, seq_slots_ptr, from_ptr, to_ptr, window, ring,
    WINDOW: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    back = tl.arange(0, WINDOW)
    inside = back < window - 1
    past = tl.load(context_lens_ptr + seq) + back - (window - 1)
    present = (past >= 0) & (tl.load(query_lens_ptr + seq) > 0)
    base = tl.load(seq_slots_ptr + seq) * ring
    target = tl.load(starts_ptr + seq) + seq * (window - 1) + back
    at = seq * (window - 1) + back
    tl.store(from_ptr + at, tl.where(present, base + (past + ring) % ring, -1), mask=inside)
    tl.store(to_ptr + at, tl.where(present, target, -1), mask=inside)


@triton.jit(do_not_specialize=["capacity", "num_seqs", "max_blocks"])
def _emit(
    starts_ptr, query_lens_ptr, positions_ptr, table_ptr, emit_ptr, entries_ptr, out_positions_ptr,
    slots_ptr, capacity, num_seqs, max_blocks, per_block,
    RATIO: tl.constexpr, ENTRIES: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    seq = tl.arange(0, SEQS)
    there = seq < num_seqs
    start = tl.load(starts_ptr + seq, mask=there, other=0)
    length = tl.load(query_lens_ptr + seq, mask=there, other=0)
    context = tl.load(positions_ptr + start, mask=there & (length > 0), other=0)
    first = context // RATIO
    count = tl.where(length > 0, (context + length) // RATIO - first, 0)
    ends = tl.cumsum(count, axis=0)
    place = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = place < capacity
    emitted = inside & (place < tl.sum(count, axis=0))
    passed = (ends[None, :] <= place[:, None]) & there[None, :]
    owner = tl.sum(passed.to(tl.int32), axis=1)
    mine = seq[None, :] == owner[:, None]
    local = place - tl.sum(tl.where(mine, (ends - count)[None, :], 0), axis=1)
    entry = tl.sum(tl.where(mine, first[None, :], 0), axis=1) + local
    row = tl.sum(tl.where(mine, (start - context)[None, :], 0), axis=1)
    row += entry * RATIO + RATIO - 1
    column = tl.minimum(entry // per_block, max_blocks - 1)
    block = tl.load(table_ptr + owner.to(tl.int64) * max_blocks + column, mask=emitted, other=-1)
    slot = tl.where(block >= 0, block * per_block + entry % per_block, -1)
    entry = tl.where(emitted, entry, 0)
    tl.store(emit_ptr + place, tl.where(emitted, row, -1), mask=inside)
    tl.store(entries_ptr + place, entry, mask=inside)
    tl.store(out_positions_ptr + place, entry * RATIO, mask=inside)
    tl.store(slots_ptr + place, tl.where(emitted, slot, -1), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _compressed_rows(
    row_seq_ptr, row_offset_ptr, positions_ptr, valid_ptr, query_lens_ptr, seq_slots_ptr,
    visible_ptr, previous_ptr, read_ptr, write_ptr, num_rows, pending_ring,
    RATIO: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    valid = tl.load(valid_ptr + row, mask=inside, other=0) != 0
    position = tl.load(positions_ptr + row, mask=inside, other=0)
    visible = tl.where(valid, (position + 1) // RATIO, 0)
    tl.store(visible_ptr + row, visible, mask=inside)
    if RATIO > 1:
        seq = tl.load(row_seq_ptr + row, mask=inside, other=0)
        offset = tl.load(row_offset_ptr + row, mask=inside, other=0)
        length = tl.load(query_lens_ptr + seq, mask=inside, other=0)
        base = tl.load(seq_slots_ptr + seq, mask=inside, other=0) * pending_ring
        previous = tl.where(offset > 0, row - 1, -1)
        kept = valid & (offset >= length - pending_ring)
        tl.store(previous_ptr + row, previous.to(tl.int64), mask=inside)
        held = base + tl.maximum(position - 1, 0) % pending_ring
        tl.store(read_ptr + row, held, mask=inside)
        ring_row = base + position % pending_ring
        tl.store(write_ptr + row, tl.where(kept, ring_row, -1), mask=inside)


def row_layout(query_lens: Tensor, context_lens: Tensor, num_rows: int) -> Rows:
    """Rows of all requests one after another; padding rows belong to the last request.

    Args:
        query_lens: [R] int64, sum at most `num_rows`.
        context_lens: [R] int64.
        num_rows: capacity T.
    """
    num_seqs = query_lens.shape[0]
    row_seq = query_lens.new_empty(num_rows)
    rows = Rows(
        row_seq,
        torch.empty_like(row_seq),
        torch.empty_like(row_seq),
        torch.empty(num_rows, dtype=torch.bool, device=query_lens.device),
        query_lens.new_empty(num_seqs + 1),
    )
    # One program at least: it writes the query starts.
    _layout[(max(1, triton.cdiv(num_rows, _ROWS)),)](
        query_lens.contiguous(), context_lens.contiguous(), *rows, num_rows, num_seqs,
        ROWS=_ROWS, SEQS=triton.next_power_of_2(num_seqs),
    )  # fmt: skip
    return rows


def window_plan(
    rows: Rows,
    query_lens: Tensor,
    context_lens: Tensor,
    seq_slots: Tensor,
    floors: Tensor,
    *,
    prefills: bool,
    window: int,
    ring: int,
) -> Window:
    """Where window rows are written, read and moved.

    Args:
        rows: the layout.
        query_lens: [R] int64.
        context_lens: [R] int64.
        seq_slots: [R] int64 ring of each request.
        floors: [R] int64 first position that may be read.
        prefills: work in the workspace and commit, instead of in the ring.
        window: W.
        ring: rows of a ring, at least W.
    """
    num_rows, num_seqs = rows.positions.shape[0], query_lens.shape[0]
    write = query_lens.new_empty(num_rows)
    read = query_lens.new_empty((num_rows, window))
    commit = torch.empty_like(write) if prefills else query_lens.new_empty(0)
    history = query_lens.new_empty((2, num_seqs * (window - 1) if prefills else 0))
    block = triton.next_power_of_2(window)
    requests = [x.contiguous() for x in (query_lens, context_lens, seq_slots)]
    if num_rows:
        _window_rows[(num_rows,)](
            rows.row_seq.contiguous(), rows.row_offset.contiguous(), rows.positions.contiguous(),
            rows.valid.contiguous(), rows.query_starts.contiguous(), *requests,
            floors.contiguous(), write, read, commit, window, ring, PREFILL=prefills, WINDOW=block,
        )  # fmt: skip
    if history.numel():
        _history[(num_seqs,)](
            rows.query_starts.contiguous(), *requests, history[0], history[1], window, ring,
            WINDOW=block,
        )  # fmt: skip
    return Window(write, read, history[0], history[1], write if prefills else commit, commit)


def compress_plan(
    rows: Rows,
    query_lens: Tensor,
    seq_slots: Tensor,
    block_table: Tensor,
    *,
    ratio: int,
    block_size: int,
    pending_ring: int,
) -> Compressed:
    """Entries that a step completes; at most ceil(query_len / ratio) for each request.

    Args:
        rows: the layout.
        query_lens: [R] int64.
        seq_slots: [R] int64.
        block_table: [R, max_blocks] int64; -1 not allocated.
        ratio: tokens per entry.
        block_size: tokens per block.
        pending_ring: rows of each request's ring of waiting rows.
    """
    num_rows, num_seqs = rows.positions.shape[0], query_lens.shape[0]
    capacity = (num_rows + num_seqs * (ratio - 1)) // ratio
    emitted = query_lens.new_empty((4, capacity))
    per_row = query_lens.new_empty((4 if ratio > 1 else 1, num_rows))
    nothing = query_lens.new_empty(0)
    pending = (nothing, nothing, nothing)
    if num_rows == 0:
        absent, zeros = emitted[0].fill_(-1), emitted[1].zero_()
        return Compressed(absent, zeros, zeros, absent, per_row[0], *pending)
    if ratio > 1:
        pending = (per_row[1], per_row[2], per_row[3])
    query_lens, table = query_lens.contiguous(), block_table.contiguous()
    positions, starts = rows.positions.contiguous(), rows.query_starts.contiguous()
    if capacity:
        _emit[(triton.cdiv(capacity, _ROWS),)](
            starts, query_lens, positions, table, *emitted, capacity, num_seqs, table.shape[1],
            block_size // ratio, RATIO=ratio, ENTRIES=_ROWS,
            SEQS=triton.next_power_of_2(num_seqs),
        )  # fmt: skip
    _compressed_rows[(triton.cdiv(num_rows, _ROWS),)](
        rows.row_seq.contiguous(), rows.row_offset.contiguous(), positions,
        rows.valid.contiguous(), query_lens, seq_slots.contiguous(), per_row[0], *pending,
        num_rows, pending_ring, RATIO=ratio, ROWS=_ROWS,
    )  # fmt: skip
    emit, entries, starts_at, slots = emitted
    return Compressed(emit, entries, starts_at, slots, per_row[0], *pending)


def row_layout_truth(
    query_lens: list[int], context_lens: list[int], num_rows: int
) -> list[tuple[int, int, int, bool]]:
    """(request, offset, position, valid) of every row, as a loop."""
    rows = [
        (seq, offset, context + offset, True)
        for seq, (length, context) in enumerate(zip(query_lens, context_lens, strict=True))
        for offset in range(length)
    ]
    padding = (len(query_lens) - 1, 0, 0, False)
    return rows + [padding] * (num_rows - len(rows))


def _int64(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*i64")


_ROW_POINTERS = {
    **_int64("row_seq_ptr", "row_offset_ptr", "positions_ptr"), "valid_ptr": "*i1",
}  # fmt: skip
COMPILE_CASES = (
    CompileCase(
        "_layout",
        {
            **_int64("query_lens_ptr", "context_lens_ptr"), **_ROW_POINTERS,
            **_int64("starts_ptr"), "num_rows": "i32", "num_seqs": "i32",
        },
        {"ROWS": _ROWS, "SEQS": 256},
    ),
    *(
        CompileCase(
            "_window_rows",
            {
                **_ROW_POINTERS,
                **_int64(
                    "starts_ptr", "query_lens_ptr", "context_lens_ptr", "seq_slots_ptr",
                    "floors_ptr", "write_ptr", "read_ptr", "commit_ptr",
                ),
                "window": "i32", "ring": "i32",
            },
            {"PREFILL": prefills, "WINDOW": 128},
        )
        for prefills in (False, True)
    ),
    CompileCase(
        "_history",
        {
            **_int64(
                "starts_ptr", "query_lens_ptr", "context_lens_ptr", "seq_slots_ptr", "from_ptr",
                "to_ptr",
            ),
            "window": "i32", "ring": "i32",
        },
        {"WINDOW": 128},
    ),
    CompileCase(
        "_emit",
        {
            **_int64(
                "starts_ptr", "query_lens_ptr", "positions_ptr", "table_ptr", "emit_ptr",
                "entries_ptr", "out_positions_ptr", "slots_ptr",
            ),
            "capacity": "i32", "num_seqs": "i32", "max_blocks": "i32", "per_block": "i32",
        },
        {"RATIO": 2, "ENTRIES": _ROWS, "SEQS": 256},
    ),
    CompileCase(
        "_compressed_rows",
        {
            **_ROW_POINTERS,
            **_int64(
                "query_lens_ptr", "seq_slots_ptr", "visible_ptr", "previous_ptr", "read_ptr",
                "write_ptr",
            ),
            "num_rows": "i32", "pending_ring": "i32",
        },
        {"RATIO": 2, "ROWS": _ROWS},
    ),
)  # fmt: skip
