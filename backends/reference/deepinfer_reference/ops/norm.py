"""Reference of the norm family."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import norm


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (weight * (values * scale)).to(x.dtype)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(norm.rmsnorm)(rmsnorm)
