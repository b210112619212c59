"""Opaque handles a backend hands out; engine and model pass them to ops and never look inside."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LinearWeight(Protocol):
    """One or more matrices that share their input, packed side by side along the output."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


class GroupedWeight(Protocol):
    """A block-diagonal matrix: one [out, in] block per group."""

    @property
    def num_groups(self) -> int: ...


class ExpertWeights(Protocol):
    """Gate, up and down matrices of the physical experts a rank holds."""

    @property
    def num_experts(self) -> int: ...


class EmbeddingTable(Protocol):
    """Token embeddings."""

    @property
    def width(self) -> int: ...


class EngramTable(Protocol):
    """N-gram embedding rows; on the device, in host memory, memory-mapped or sharded."""

    @property
    def num_rows(self) -> int: ...
    @property
    def width(self) -> int: ...


class FetchHandle(Protocol):
    """Rows of an Engram table on their way; only `engram_fetch_wait` takes it."""


class ExpertBatch(Protocol):
    """Rows sorted into expert slots, with what `moe_combine` needs to bring them back."""


class RowCache(Protocol):
    """Rows of KV state of one kind; the byte layout belongs to the backend.

    Rows are addressed by slot, 0 .. num_rows - 1. `unpack` and `pack` convert to and from the
    canonical form: fp32 values [num_slots, width].
    """

    @property
    def record(self) -> str:
        """Name of the row format, for example `f32` or `window_mxfp8:bf16`."""
        ...

    @property
    def num_rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def row_bytes(self) -> int:
        """Bytes of one row as this backend stores it."""
        ...

    def byte_view(self, first_row: int, num_rows: int) -> Tensor:
        """uint8 view of `num_rows` rows from `first_row` (transfer, tiers, checksums)."""
        ...

    def pack(self, slots: Tensor, values: Tensor) -> None:
        """Write canonical fp32 values [n, width] that this record can hold into slots [n]."""
        ...

    def unpack(self, slots: Tensor) -> Tensor:
        """Canonical fp32 values [n, width] of slots [n]."""
        ...

    def poison(self, slots: Tensor) -> None:
        """Overwrite slots [n] with NaN: a test mode's proof that nobody reads them any more."""
        ...
