"""Canonical form of the opaque handles: what a backend packs and a naive truth reads.

Handles that an op hands out (expert batches, slot outputs, started fetches) are described by the
call that makes them; a backend makes its own by that call.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.ops.moe import Routing
from deepinfer.device.weights import StoredTensor

# eq=False: two arguments that share an object must be packed once, so identity is the key.


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalLinear:
    """Matrices that share their input, for `pack_linear`."""

    parts: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalGrouped:
    """A block-diagonal matrix [num_groups * N, K], for `pack_grouped`."""

    weight: StoredTensor
    num_groups: int


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalExperts:
    """Experts in physical order, for `pack_experts`: gate and up [I, D], down [D, I]."""

    gate: tuple[StoredTensor, ...]
    up: tuple[StoredTensor, ...]
    down: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalVector:
    """A small parameter, for `pack_vector`: F32 or BF16."""

    value: StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalMhc:
    """The three parameters of one sublayer's mixing; becomes `MhcWeights` of packed vectors."""

    fn: CanonicalVector
    scale: CanonicalVector
    base: CanonicalVector


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalEmbedding:
    """Token embeddings [V, D], for `pack_embedding`."""

    table: StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalEngram:
    """An Engram table [R, N], for `pack_engram_table`."""

    table: StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalCache:
    """Rows of a cache, for `create_cache` and `RowCache.pack`.

    Attributes:
        kind: which cache.
        values: [num_rows, width] fp32 that the record of the numerics mode can hold.
        poisoned: rows that hold NaN, because nobody may read them.
    """

    kind: CacheKind
    values: Tensor
    poisoned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalBatch:
    """Rows in expert slots: the arguments of `moe_dispatch`."""

    x: Tensor
    routing: Routing
    physical: Tensor
    valid: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalSlots:
    """Slot outputs: those of `moe_experts`, or the same shape filled with one row.

    Attributes:
        batch: the batch whose slots they are.
        experts: weights for `moe_experts`.
        swiglu_limit: clamp for `moe_experts`.
        fill: [D] activation dtype that replaces every slot's output, or None.
    """

    batch: CanonicalBatch
    experts: CanonicalExperts
    swiglu_limit: float
    fill: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalFetch:
    """A started fetch: the arguments of `engram_fetch_start`."""

    table: CanonicalEngram
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ForeignHandle:
    """A handle that no backend made; every op must refuse it."""

    kind: str
