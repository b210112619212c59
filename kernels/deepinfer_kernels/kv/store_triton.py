"""Writing rows into caches, moving them, and finding them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.attention.rotation_triton import rotated
from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.kv.records_triton import store_record

_ENTRIES = 1024
"""Entries of one program of the slot lookup."""


@triton.jit
def _rope_store(
    x_ptr, positions_ptr, slots_ptr, table_ptr, cache_ptr, width, num_rotated, row_stride,
    cache_stride, RECORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        position = tl.load(positions_ptr + row)
        value = rotated(
            x_ptr + row * row_stride, table_ptr + position * num_rotated, column,
            column < width, width, num_rotated, False,
        )  # fmt: skip
        store_record(cache_ptr + slot * cache_stride, value, width, RECORD, BLOCK)


@triton.jit
def _copy_rows(source_ptr, source_slots_ptr, slots_ptr, target_ptr, row_bytes, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    source = tl.load(source_slots_ptr + row)
    slot = tl.load(slots_ptr + row)
    if (source >= 0) & (slot >= 0):
        column = tl.arange(0, BLOCK)
        inside = column < row_bytes
        found = tl.load(source_ptr + source * row_bytes + column, mask=inside)
        tl.store(target_ptr + slot * row_bytes + column, found, mask=inside)


@triton.jit(do_not_specialize=["count", "per_row", "max_blocks"])
def _entry_slots(
    entries_ptr, row_seq_ptr, table_ptr, out_ptr, count, per_row, max_blocks, per_block,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    entry = tl.load(entries_ptr + at, mask=inside, other=-1)
    seq = tl.load(row_seq_ptr + at // per_row, mask=inside, other=0)
    column = tl.minimum(tl.maximum(entry, 0) // per_block, max_blocks - 1)
    block = tl.load(table_ptr + seq * max_blocks + column, mask=inside & (entry >= 0), other=-1)
    slot = tl.where(block >= 0, block * per_block + entry % per_block, -1)
    tl.store(out_ptr + at, slot, mask=inside)


def rope_store(
    x: Tensor, positions: Tensor, slots: Tensor, table: Tensor, *, cache: Tensor, record: str
) -> None:
    """Rotate rows, quantise them as `record` says and write them; changes `cache` in place.

    Args:
        x: [n, N] bf16 or fp32.
        positions: [n] int64, rows of `table`.
        slots: [n] int64, distinct; -1 skips the row.
        table: [max_positions, R] fp32.
        cache: [rows, N] fp32 (`plain`) or [rows, bytes] uint8.
        record: `plain`, `mxfp8`, `nvfp4` or `mxfp4`.
    """
    if x.shape[0] == 0:
        return
    if x.stride(-1) != 1:
        x = x.contiguous()
    width = x.shape[1]
    _rope_store[(x.shape[0],)](
        x, positions.contiguous(), slots.contiguous(), table, cache, width, table.shape[1],
        x.stride(0), cache.shape[1], RECORD=record, BLOCK=max(32, triton.next_power_of_2(width)),
    )  # fmt: skip


def copy_rows(source: Tensor, source_slots: Tensor, slots: Tensor, *, target: Tensor) -> None:
    """Copy rows of bytes; changes `target` in place.

    Args:
        source: [rows, bytes] uint8.
        source_slots: [n] int64; -1 skips the row.
        slots: [n] int64, distinct; -1 skips the row.
        target: [rows, bytes] uint8.
    """
    if slots.shape[0] == 0:
        return
    row_bytes = source.shape[1]
    _copy_rows[(slots.shape[0],)](
        source, source_slots.contiguous(), slots.contiguous(), target, row_bytes,
        BLOCK=triton.next_power_of_2(row_bytes),
    )  # fmt: skip


def entry_slots(
    entries: Tensor, row_seq: Tensor, block_table: Tensor, entries_per_block: int
) -> Tensor:
    """Cache rows [T, K] int64 of entries [T, K]; -1 where the entry or its block is absent.

    Args:
        entries: [T, K] int64; -1 absent.
        row_seq: [T] int64 row of `block_table`.
        block_table: [R, max_blocks] int64; -1: not allocated.
        entries_per_block: entries of one block.
    """
    entries = entries.contiguous()
    out = torch.empty_like(entries)
    if out.numel():
        _entry_slots[(triton.cdiv(out.numel(), _ENTRIES),)](
            entries, row_seq.contiguous(), block_table.contiguous(), out, out.numel(),
            entries.shape[1], block_table.shape[1], entries_per_block, BLOCK=_ENTRIES,
        )  # fmt: skip
    return out


def entry_slots_truth(
    entries: Tensor, row_seq: Tensor, block_table: Tensor, entries_per_block: int
) -> Tensor:
    """`entry_slots` as a loop."""
    out = torch.full_like(entries, -1)
    for row, chosen in enumerate(entries.tolist()):
        for column, entry in enumerate(chosen):
            if entry >= 0:
                block = int(block_table[row_seq[row], entry // entries_per_block])
                if block >= 0:
                    out[row, column] = block * entries_per_block + entry % entries_per_block
    return out


_STORE = {
    "x_ptr": "*bf16", "positions_ptr": "*i64", "slots_ptr": "*i64", "table_ptr": "*fp32",
    "cache_ptr": "*u8", "width": "i32", "num_rotated": "i32", "row_stride": "i32",
    "cache_stride": "i32",
}  # fmt: skip
COMPILE_CASES = (
    *(
        CompileCase("_rope_store", _STORE, {"RECORD": record, "BLOCK": block})
        for record, block in (("mxfp8", 512), ("nvfp4", 512), ("mxfp4", 128))
    ),
    CompileCase(
        "_copy_rows",
        {
            "source_ptr": "*u8", "source_slots_ptr": "*i64", "slots_ptr": "*i64",
            "target_ptr": "*u8", "row_bytes": "i32",
        },
        {"BLOCK": 1024},
    ),
    CompileCase(
        "_entry_slots",
        {
            "entries_ptr": "*i64", "row_seq_ptr": "*i64", "table_ptr": "*i64", "out_ptr": "*i64",
            "count": "i32", "per_row": "i32", "max_blocks": "i32", "per_block": "i32",
        },
        {"BLOCK": _ENTRIES},
    ),
)  # fmt: skip
