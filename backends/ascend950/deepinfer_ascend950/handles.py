"""Packed weights as the operators want them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError

_Handle = TypeVar("_Handle")


def own_handle(handle: object, expected: type[_Handle]) -> _Handle:
    """`handle` as the class of this backend behind it.

    Raises:
        ContractError: another backend made it, or it is a handle of another kind.
    """
    if not isinstance(handle, expected):
        raise ContractError(
            f"ascend950 was given a handle of type {type(handle).__name__}, expected "
            f"{expected.__name__}; handles belong to the backend that made them"
        )
    return handle


@dataclass(frozen=True, slots=True)
class MxLinear:
    """Quantised matrices side by side.

    Attributes:
        codes: [N, K] float8_e4m3fn.
        scales: [N, ceil(K / 64), 2] uint8; those of a 32 x 32 tile are repeated for its rows.
    """

    codes: Tensor
    scales: Tensor

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """Matrices side by side as they are stored.

    Attributes:
        matrix: [N, K] fp32 or bf16.
        matrix_f32: the same in fp32, for products that promise fp32; `matrix` itself if it is.
    """

    matrix: Tensor
    matrix_f32: Tensor

    @property
    def in_features(self) -> int:
        return self.matrix.shape[1]

    @property
    def out_features(self) -> int:
        return self.matrix.shape[0]


@dataclass(frozen=True, slots=True)
class GroupedBlocks:
    """blocks: [G, K, N] in the activation dtype."""

    blocks: Tensor

    @property
    def num_groups(self) -> int:
        return self.blocks.shape[0]


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix for each expert, padded to the alignment of the grouped product.

    Attributes:
        data: [E, N', K' / 2] uint8 (E2M1), [E, N', K'] float8_e4m3fn, or [E, N, K] float.
        scales: [E, N', K' / 64, 2] uint8, or None for float matrices.
        out_features: N, without the padding.
    """

    data: Tensor
    scales: Tensor | None
    out_features: int


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """gate_up gives 2 I outputs of D, down gives D outputs of I."""

    gate_up: ExpertMatrices
    down: ExpertMatrices

    @property
    def num_experts(self) -> int:
        return self.down.data.shape[0]


@dataclass(frozen=True, slots=True)
class Embedding:
    """rows: [V, D] in the activation dtype."""

    rows: Tensor

    @property
    def width(self) -> int:
        return self.rows.shape[1]


@dataclass(frozen=True, slots=True)
class EngramRows:
    """Table rows where the checkpoint has them: in host memory, usually memory-mapped.

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
    """A fetch whose row numbers are on their way to the host."""

    table: EngramRows
    rows: Tensor


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Rows in expert slots, sorted by physical expert; pairs of invalid rows stand last.

    Attributes:
        rows: [T * k, D] activation dtype.
        experts: [T * k] int64 physical expert of each slot; `NO_EXPERT` for invalid rows.
        weights: [T * k] fp32 routing weight of each slot.
        places: [T, k] int32 slots of each row in ascending logical expert.
    """

    rows: Tensor
    experts: Tensor
    weights: Tensor
    places: Tensor


NO_EXPERT = 1 << 20
"""Above every expert, so that a sort puts it last, and within the sort's documented range."""
