"""Contracts read from docstrings, and calls that differ from them."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepinfer.device.contract import check_call, tensor_contracts
from deepinfer.device.errors import ContractError


class Rows(NamedTuple):
    """Rows of a step.

    Attributes:
        valid: [T] bool.
        starts: [R + 1] int64 prefix sums.
    """

    valid: Tensor
    starts: Tensor


def gather(x: Tensor, lens: Tensor, pairs: Tensor, rows: Rows, table: Tensor | None) -> Tensor:
    """A contract.

    Args:
        x: [..., N] float.
        lens: [R] int64.
        pairs: [T, 2 C] activation dtype (empty for ratio 1).
        rows: the layout.
        table: [T, C] activation dtype, or None.

    Returns:
        x: [never] bool.
    """
    raise NotImplementedError


CONTRACTS = tensor_contracts(inspect.signature(gather), gather.__doc__ or "", __name__)


def _right() -> dict[str, object]:
    return {
        "x": torch.zeros(2, 5, 8),
        "lens": torch.tensor([1, 2]),
        "pairs": torch.zeros(3, 4, dtype=torch.bfloat16),
        "rows": Rows(torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 3])),
        "table": torch.zeros(3, 2, dtype=torch.bfloat16),
    }


def _check(**changes: object) -> None:
    check_call("gather", CONTRACTS, {**_right(), **changes}, torch.bfloat16)


def test_fields_of_named_tuples_are_part_of_the_contract() -> None:
    names = [contract.name for contract in CONTRACTS]
    assert names == ["x", "lens", "pairs", "table", "rows.valid", "rows.starts"]


def test_right_call_passes() -> None:
    _check()
    _check(table=None)
    _check(pairs=torch.zeros(0, dtype=torch.bfloat16))
    _check(x=torch.zeros(8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(())}, r"gather: x has shape \(\); the contract says `x: \[\.\.\., N\]"),
        ({"x": torch.zeros(2, dtype=torch.int64)}, "x has dtype torch.int64, expected a float"),
        ({"lens": torch.zeros(2)}, "lens has dtype torch.float32, expected torch.int64"),
        ({"pairs": torch.zeros(3, 4)}, "pairs has dtype torch.float32, expected torch.bfloat16"),
        ({"pairs": torch.zeros(4, 4, dtype=torch.bfloat16)}, "and T is 4 in pairs"),
        ({"pairs": torch.zeros(3, 6, dtype=torch.bfloat16)}, "and 2 C is 4"),
        ({"lens": torch.tensor([1, 2, 3])}, "R [+] 1 is 4"),
    ],
)
def test_wrong_call_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        _check(**changes)


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(ContractError, match="is on meta, the tensors before it on cpu"):
        _check(lens=torch.zeros(2, dtype=torch.int64, device="meta"))
