"""KV family."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops import kv
from deepinfer_ascend950.caches import byte_rows
from deepinfer_ascend950.ops.rotation import rotate


def rope_store(
    x: Tensor, positions: Tensor, slots: Tensor, rope_table: Tensor, *, cache: RowCache
) -> None:
    byte_rows(cache).store(slots, rotate(x, positions, rope_table, inverse=False))


def copy_rows(
    source: RowCache, source_slots: Tensor, destination_slots: Tensor, *, destination: RowCache
) -> None:
    read, written = byte_rows(source), byte_rows(destination)
    if read.record != written.record or read.width != written.width:
        raise ContractError(
            f"copy_rows from record {read.record} of width {read.width} to record "
            f"{written.record} of width {written.width}; expected two caches of one record and "
            "width, because bytes are copied"
        )
    target = torch.where(source_slots < 0, -1, destination_slots)
    written.put(target, read.take(source_slots))


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
    table.implements(
        kv.rope_store,
        reason="torch rotation and records, window rows by npu_dynamic_mx_quant, written by "
        "npu_scatter_nd_update_; the fused epilogue operators write the V4 record",
        layout="528 B e4m3+ue8m0, 288 B E2M1+e4m3, 68 B E2M1+ue8m0 rows as int8",
    )(rope_store)
    table.implements(
        kv.copy_rows, reason="torch gather, npu_scatter_nd_update_", layout="bytes of the record"
    )(copy_rows)
    table.implements(kv.entry_slots, reason="torch: integer arithmetic", layout="int64")(
        entry_slots
    )
