"""Norm family on Triton kernels."""

from __future__ import annotations

from deepinfer.device.op import OpTable
from deepinfer.device.ops import norm
from deepinfer_kernels.norm.rmsnorm_triton import rmsnorm


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(norm.rmsnorm, reason=reason)(rmsnorm)
