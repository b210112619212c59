"""Packed weights of the reference: everything dequantised once to fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.formats import dequantize_a8

_Handle = TypeVar("_Handle")


def own_handle(handle: object, expected: type[_Handle]) -> _Handle:
    """`handle` as the reference's own class behind it.

    Raises:
        ContractError: another backend made it, or it is a handle of another kind.
    """
    if not isinstance(handle, expected):
        raise ContractError(
            f"the reference was given a handle of type {type(handle).__name__}, expected "
            f"{expected.__name__}; handles belong to the backend that made them"
        )
    return handle


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Matrices side by side; `quantizes_input` when the product is W8A8 or W4A8.

    Attributes:
        matrix: [K, N] fp32, transposed for the product.
        quantizes_input: the input is rounded to e4m3 groups first.
    """

    matrix: Tensor
    quantizes_input: bool

    @property
    def in_features(self) -> int:
        return self.matrix.shape[0]

    @property
    def out_features(self) -> int:
        return self.matrix.shape[1]


@dataclass(frozen=True, slots=True)
class DenseGrouped:
    """blocks: [G, K, N] fp32, transposed for the batched product."""

    blocks: Tensor

    @property
    def num_groups(self) -> int:
        return self.blocks.shape[0]


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Per expert: gate_up [D, 2 I] fp32 and down [I, D] fp32, transposed for the product."""

    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    quantizes_input: bool

    @property
    def num_experts(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class DenseEmbedding:
    """rows: [V, D] in the activation dtype."""

    rows: Tensor

    @property
    def width(self) -> int:
        return self.rows.shape[1]


@dataclass(frozen=True, slots=True)
class EngramRows:
    """Table rows where the checkpoint has them, usually memory-mapped; decoded when fetched.

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

    def fetch(self, rows: Tensor) -> Tensor:
        """[T, columns * N] in the activation dtype."""
        flat = rows.flatten()
        data = self.data.index_select(0, flat)
        if self.scale is None:
            values = data.float()
        else:
            codes = data.view(torch.float8_e4m3fn)
            values = dequantize_a8(codes, self.scale.index_select(0, flat))
        return values.to(self.dtype).view(rows.shape[0], rows.shape[1] * self.width)


@dataclass(frozen=True, slots=True)
class StartedFetch:
    """A fetch that the reference does when it is waited for."""

    table: EngramRows
    rows: Tensor


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Rows in expert slots; each expert's run of slots is padded to the row tile.

    Attributes:
        x: [T, D] activation dtype.
        slot_rows: [S] int64 row of each slot; padding slots repeat row 0.
        slot_weights: [S] fp32 routing weight; 0 for padding.
        runs: (expert, first slot, last slot + 1) of every expert that has rows.
        slots: [T, k] int64 slots of each row in ascending logical expert; -1 for invalid rows.
    """

    x: Tensor
    slot_rows: Tensor
    slot_weights: Tensor
    runs: tuple[tuple[int, int, int], ...]
    slots: Tensor
