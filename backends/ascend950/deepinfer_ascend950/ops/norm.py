"""Norm family."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import norm
from deepinfer_ascend950.operators import NpuOperators


class NormOps:
    """RMSNorm in fp32, cast once."""

    def __init__(self, npu: NpuOperators) -> None:
        self._npu = npu

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._npu.rms_norm(x.float(), weight, eps).to(x.dtype)

    def register(self, table: OpTable) -> None:
        """Add this family's implementations to `table`."""
        table.implements(
            norm.rmsnorm,
            reason="npu_rms_norm on fp32: the rounding points of bf16 input are not documented",
            layout="x and weight fp32, cast once",
        )(self.rmsnorm)
