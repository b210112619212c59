"""Reference of the KV family."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops import kv
from deepinfer_reference.caches import dense_rows
from deepinfer_reference.ops.attention import rotate


def rope_store(
    x: Tensor, positions: Tensor, slots: Tensor, rope_table: Tensor, *, cache: RowCache
) -> None:
    rows = dense_rows(cache)
    rows.store(slots, rows.quantize(rotate(x, positions, rope_table, inverse=False)))


def copy_rows(
    source: RowCache, source_slots: Tensor, destination_slots: Tensor, *, destination: RowCache
) -> None:
    read, written = dense_rows(source), dense_rows(destination)
    if read.record != written.record or read.width != written.width:
        raise ContractError(
            f"copy_rows from record {read.record} of width {read.width} to record "
            f"{written.record} of width {written.width}; expected two caches of one record and "
            "width, because rows are copied without conversion"
        )
    kept = (source_slots >= 0) & (destination_slots >= 0)
    written.values[destination_slots[kept]] = read.values[source_slots[kept]]


def entry_slots(
    entries: Tensor, row_seq: Tensor, block_table: Tensor, entries_per_block: int
) -> Tensor:
    present = entries.clamp_min(0)
    column = torch.div(present, entries_per_block, rounding_mode="floor")
    column = column.clamp_max(block_table.shape[1] - 1)
    blocks = block_table.index_select(0, row_seq).gather(1, column)
    slots = blocks * entries_per_block + present % entries_per_block
    return torch.where((entries >= 0) & (blocks >= 0), slots, -1)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(kv.rope_store)(rope_store)
    table.implements(kv.copy_rows)(copy_rows)
    table.implements(kv.entry_slots)(entry_slots)
