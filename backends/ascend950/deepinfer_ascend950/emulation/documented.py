"""Checks that the operators' pages state: ranks, dtypes, layouts, allowed values."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from deepinfer.device.errors import CapabilityError, ContractError


class OperatorPage:
    """The documented constraints of one operator; every method raises when one is broken."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def require(self, holds: bool, words: str) -> None:
        """Refuse the call unless `holds`.

        Raises:
            ContractError: it does not.
        """
        if not holds:
            raise ContractError(f"{self.operator}: {words}; see its page in the emulation")

    def rank(self, name: str, tensor: Tensor, ranks: Collection[int]) -> None:
        """The tensor has one of the ranks."""
        self.require(
            tensor.dim() in ranks,
            f"{name} has shape {list(tensor.shape)}, documented are {sorted(ranks)} dimensions",
        )

    def dtype(self, name: str, tensor: Tensor, dtypes: Collection[torch.dtype]) -> None:
        """The tensor has one of the dtypes."""
        self.require(
            tensor.dtype in dtypes,
            f"{name} is {tensor.dtype}, documented are {sorted(map(str, dtypes))}",
        )

    def shape(self, name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
        """The tensor has exactly this shape."""
        self.require(
            tuple(tensor.shape) == expected,
            f"{name} has shape {list(tensor.shape)}, expected {list(expected)}",
        )

    def filled(self, name: str, tensor: Tensor) -> None:
        """The tensor is not empty."""
        self.require(tensor.numel() > 0, f"{name} is empty, which the page forbids")

    def value(self, name: str, value: object, allowed: Collection[object]) -> None:
        """The value is one of those allowed."""
        self.require(
            value in allowed, f"{name} is {value!r}, documented are {sorted(map(repr, allowed))}"
        )

    def not_emulated(self, words: str) -> CapabilityError:
        """The error for a documented case that this emulation leaves out."""
        return CapabilityError(
            f"{self.operator}: {words} is documented but not emulated; the backend does not use "
            "it, so extend the emulation before you do"
        )


def is_transposed(matrix: Tensor) -> bool:
    """The last two dimensions of [..., K, N] are a transposed view of a contiguous [..., N, K]."""
    return matrix.transpose(-1, -2).is_contiguous()
