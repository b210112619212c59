"""A backend that lacks ops is refused before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from deepinfer.device.errors import CapabilityError
from deepinfer.device.op import OpTable
from deepinfer.device.ops import norm
from deepinfer.model.loading import load_model
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.weights.reader import CheckpointReader

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer.device.backend import Backend

GOLDEN = Path(__file__).parents[2] / "data/golden/tiny_a/checkpoint"


def _poor_table() -> OpTable:
    table = OpTable("poor", device="toaster:0", dtype="bfloat16")

    @table.implements(norm.rmsnorm)
    def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * weight + eps

    return table


def test_every_missing_op_is_named_with_dtype_and_device() -> None:
    with pytest.raises(CapabilityError) as caught:
        ModelOps(_poor_table())
    message = str(caught.value)
    assert "attention/sparse_attention" in message
    assert "moe/moe_experts" in message
    assert "norm/rmsnorm" not in message
    assert "bfloat16" in message
    assert "toaster:0" in message


def test_weights_are_not_read_for_a_backend_that_lacks_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Poor:
        ops = _poor_table()

    def read(*_: object, **__: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(CheckpointReader, "parameters", read)
    with pytest.raises(CapabilityError, match="cannot run this model"):
        load_model(GOLDEN, cast("Backend", Poor()))
