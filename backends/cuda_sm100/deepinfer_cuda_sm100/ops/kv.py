"""KV family on Triton kernels."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops import kv
from deepinfer_cuda_sm100.caches import record_rows
from deepinfer_kernels.kv import store_triton


def rope_store(
    x: Tensor, positions: Tensor, slots: Tensor, rope_table: Tensor, *, cache: RowCache
) -> None:
    rows = record_rows(cache)
    store_triton.rope_store(x, positions, slots, rope_table, cache=rows.rows, record=rows.format)


def copy_rows(
    source: RowCache, source_slots: Tensor, destination_slots: Tensor, *, destination: RowCache
) -> None:
    read, written = record_rows(source), record_rows(destination)
    if read.record != written.record or read.width != written.width:
        raise ContractError(
            f"copy_rows from record {read.record} of width {read.width} to record "
            f"{written.record} of width {written.width}; expected two caches of one record and "
            "width, because rows are copied without conversion"
        )
    store_triton.copy_rows(read.bytes, source_slots, destination_slots, target=written.bytes)


def entry_slots(
    entries: Tensor, row_seq: Tensor, block_table: Tensor, entries_per_block: int
) -> Tensor:
    return store_triton.entry_slots(entries, row_seq, block_table, entries_per_block)


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(kv.rope_store, reason=reason)(rope_store)
    table.implements(kv.copy_rows, reason=reason)(copy_rows)
    table.implements(kv.entry_slots, reason=reason)(entry_slots)
