"""Packed weights and slot batches of the CUDA backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer_kernels.quant.gemm_triton import Operand

_Handle = TypeVar("_Handle")


def own_handle(handle: object, expected: type[_Handle]) -> _Handle:
    """`handle` as this backend's own class behind it.

    Raises:
        ContractError: another backend made it, or it is a handle of another kind.
    """
    if not isinstance(handle, expected):
        raise ContractError(
            f"cuda_sm100 was given a handle of type {type(handle).__name__}, expected "
            f"{expected.__name__}; handles belong to the backend that made them"
        )
    return handle


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Matrices side by side.

    Attributes:
        operand: [N, K], plain or with one scale per row and 32 columns.
        quantizes_input: the input is quantised to e4m3 groups first.
        block_scaled: codes and scales go to the tensor cores as they are.
    """

    operand: Operand
    quantizes_input: bool
    block_scaled: bool

    @property
    def in_features(self) -> int:
        return self.operand.inner

    @property
    def out_features(self) -> int:
        return self.operand.data.shape[0]


@dataclass(frozen=True, slots=True)
class PackedGrouped:
    """operand: [G, N, K], plain."""

    operand: Operand

    @property
    def num_groups(self) -> int:
        return self.operand.data.shape[0]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """gate_up: [E, 2 I, D]; down: [E, D, I]; both packed alike."""

    gate_up: Operand
    down: Operand
    quantizes_input: bool
    block_scaled: bool

    @property
    def num_experts(self) -> int:
        return self.down.data.shape[0]


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """rows: [V, D] in the activation dtype."""

    rows: Tensor

    @property
    def width(self) -> int:
        return self.rows.shape[1]


@dataclass(frozen=True, slots=True)
class PackedEngram:
    """Table rows on the device or in pinned host memory; decoded when fetched.

    Attributes:
        data: [R, N] e4m3 as uint8, or a float table.
        scale: [R, N / 32] uint8, or None for a float table.
        dtype: activation dtype of fetched rows.
    """

    data: Tensor
    scale: Tensor | None
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]

    @property
    def width(self) -> int:
        return self.data.shape[1]


@dataclass(frozen=True, slots=True)
class StartedFetch:
    """values: [T, columns * N], being written on the stream that started the fetch."""

    values: Tensor


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Rows in expert slots; each expert's slots are padded to whole tiles.

    Attributes:
        x: [T, D] activation dtype.
        tile_experts: [tiles] int32 physical expert of each tile; -1: not used.
        slot_rows: [S] int32 row of each slot; -1 for padding.
        slot_weights: [S] fp32 routing weight of each slot that has a row.
        slots: [T, k] int32 slots of each row in ascending logical expert; -1 for invalid rows.
    """

    x: Tensor
    tile_experts: Tensor
    slot_rows: Tensor
    slot_weights: Tensor
    slots: Tensor
