"""What a backend is: a runtime, an op table, and the packing of weights and caches."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.device.handles import (
    EmbeddingTable,
    EngramTable,
    ExpertWeights,
    GroupedWeight,
    LinearWeight,
    RowCache,
)
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpTable
from deepinfer.device.runtime import Runtime
from deepinfer.device.weights import StoredTensor

DECODE_GRAPHS = "decode_graphs"
"""Feature of a backend on which a decode step replayed as a graph is faster than its launches."""


class CacheKind(enum.Enum):
    """Kinds of row caches; their record (byte format) is the backend's choice per numerics."""

    WINDOW = "window"
    COMPRESSED = "compressed"
    INDEX = "index"


class Backend(Protocol):
    """One device family, created by its plugin for one numerics mode.

    `pack_*` turn logical parameters into whatever the ops want; the engine only passes the
    handles on. All packed memory is on the runtime's device unless a table says otherwise.
    """

    @property
    def name(self) -> str: ...
    @property
    def numerics(self) -> Numerics: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def ops(self) -> OpTable: ...
    @property
    def features(self) -> frozenset[str]:
        """Declared capabilities, for example `batch_invariant`, `graph_capture`."""
        ...

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of residual streams and activations: fp32 (exact) or bf16 (normative)."""
        ...

    def pack_linear(self, parts: Sequence[StoredTensor]) -> LinearWeight:
        """Pack matrices [N_i, K] that share their input; outputs are concatenated in order."""
        ...

    def pack_grouped(self, weight: StoredTensor, num_groups: int) -> GroupedWeight:
        """Pack [num_groups * N, K] as one [N, K] block per group; input is not quantised."""
        ...

    def pack_experts(
        self,
        gate: Sequence[StoredTensor],
        up: Sequence[StoredTensor],
        down: Sequence[StoredTensor],
    ) -> ExpertWeights:
        """Pack routed experts in physical order: gate and up [I, D], down [D, I] each."""
        ...

    def pack_vector(self, value: StoredTensor) -> Tensor:
        """fp32 tensor of the logical shape on the device (norms, biases, sinks, mHC)."""
        ...

    def pack_embedding(self, table: StoredTensor) -> EmbeddingTable:
        """Pack token embeddings [V, D]."""
        ...

    def pack_engram_table(self, table: StoredTensor) -> EngramTable:
        """Take an Engram table [R, N]; memory-mapped data may stay where it is."""
        ...

    def create_cache(self, kind: CacheKind, num_rows: int, width: int) -> RowCache:
        """A cache of `num_rows` zeroed rows of `width` values."""
        ...

    def cache_row_bytes(self, kind: CacheKind, width: int) -> int:
        """Bytes one row of that kind takes (sizing, before anything is allocated)."""
        ...

    def close(self) -> None:
        """Close the runtime."""
        ...


def labels_of(backend: Backend) -> tuple[str, ...]:
    """What every result of the backend has to say of it, for example `emulated`.

    A backend may have an attribute `labels`; one that computes on its own device needs none.
    """
    return tuple(getattr(backend, "labels", ()))
