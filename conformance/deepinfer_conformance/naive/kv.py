"""Truths of the kv family."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.samples.canonical import CanonicalCache
from deepinfer_conformance.naive import numbers, stored
from deepinfer_conformance.naive.attention import rotated


def recorded(row: list[float], kind: CacheKind, *, normative: bool) -> list[float]:
    """A row as the record of that cache gives it back."""
    if not normative:
        return row
    if kind is CacheKind.WINDOW:
        return numbers.a8_round_trip(row)
    if kind is CacheKind.COMPRESSED:
        return numbers.q4_e4m3_round_trip(row)
    return numbers.q4_ue8m0_round_trip(row)


def rope_store(
    x: Tensor, positions: Tensor, slots: Tensor, rope_table: Tensor, *, cache: CanonicalCache
) -> None:
    """Row by row, in place."""
    table = stored.matrix(rope_table)
    for row, position, slot in zip(
        stored.matrix(x), positions.tolist(), slots.tolist(), strict=True
    ):
        if slot < 0:
            continue
        turned = rotated(row, table[position], inverse=False, like=x)
        kept = recorded(turned, cache.kind, normative=numbers.is_normative(x))
        cache.values[slot] = torch.tensor(kept, dtype=torch.float64).float()


def copy_rows(
    source: CanonicalCache,
    source_slots: Tensor,
    destination_slots: Tensor,
    *,
    destination: CanonicalCache,
) -> None:
    """Row by row, in place."""
    for read, written in zip(source_slots.tolist(), destination_slots.tolist(), strict=True):
        if read >= 0 and written >= 0:
            destination.values[written] = source.values[read]


def entry_slots(
    entries: Tensor, row_seq: Tensor, block_table: Tensor, entries_per_block: int
) -> Tensor:
    """Entry by entry; [T, K] int64."""
    result = torch.full(entries.shape, -1, dtype=torch.int64)
    for row, seq in enumerate(row_seq.tolist()):
        for column, entry in enumerate(entries[row].tolist()):
            if entry >= 0:
                block = int(block_table[seq, entry // entries_per_block])
                if block >= 0:
                    result[row, column] = block * entries_per_block + entry % entries_per_block
    return result
