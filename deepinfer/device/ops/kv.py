"""KV family: writing rows into caches, moving them, and finding them."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.comparison import Codes, Exact
from deepinfer.device.handles import RowCache
from deepinfer.device.op import op


@op(family="kv", compare={"cache": Codes()}, mutates=("cache",))
def rope_store(
    x: Tensor, positions: Tensor, slots: Tensor, rope_table: Tensor, *, cache: RowCache
) -> None:
    """Rotate the last R dimensions of each row, quantise as the cache's record says, store.

    Args:
        x: [n, N] activation dtype, already normalised; cast to x's dtype after the rotation.
        positions: [n] int64, rows of `rope_table`; any valid row where the slot is -1.
        slots: [n] int64 cache rows, distinct; -1 skips the row.
        rope_table: [max_positions, R] fp32, cos of the R / 2 pairs, then sin.
        cache: rows of width N; changed in place.

    Raises:
        ContractError: another backend made the cache.
    Contract: skipped rows may hold NaN; zero rows allowed; does not synchronise.
    Source: window KV, compressed KV and index keys of CSA2 (rotation pairs are interleaved).
    """
    raise NotImplementedError


@op(family="kv", compare={"destination": Exact()}, mutates=("destination",))
def copy_rows(
    source: RowCache, source_slots: Tensor, destination_slots: Tensor, *, destination: RowCache
) -> None:
    """Copy rows between two caches of the same record, bit by bit.

    Args:
        source: cache read.
        source_slots: [n] int64; -1 skips the row.
        destination_slots: [n] int64, distinct; -1 skips the row.
        destination: cache written; may be `source` when no row is both read and written.

    Raises:
        ContractError: the caches differ in record or width, or another backend made one.
    """
    raise NotImplementedError


@op(family="kv", compare=Exact())
def entry_slots(
    entries: Tensor, row_seq: Tensor, block_table: Tensor, entries_per_block: int
) -> Tensor:
    """Cache rows of compressed entries, through each request's block table.

    Args:
        entries: [T, K] int64 entry indices of the row's request; -1 absent.
        row_seq: [T] int64 request of each row, 0 .. R - 1 (padding rows too).
        block_table: [R, max_blocks] int64 block of each run of `entries_per_block` entries;
            -1 where no block is allocated.
        entries_per_block: block size in tokens over the compression ratio.

    Returns:
        [T, K] int64 cache rows; -1 where the entry is absent or its block is.
    """
    raise NotImplementedError
