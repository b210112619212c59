"""The table of all ops; made without a device for `deepinfer backends --explain --assume`."""

from __future__ import annotations

from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpTable
from deepinfer_ascend950.operators import NpuOperators
from deepinfer_ascend950.ops import attention, compress, engram, indexer, kv, sampling, state
from deepinfer_ascend950.ops.mhc import MhcOps
from deepinfer_ascend950.ops.moe import MoeOps
from deepinfer_ascend950.ops.norm import NormOps
from deepinfer_ascend950.ops.quant import QuantOps


def build_op_table(npu: NpuOperators, numerics: Numerics, *, device: str) -> OpTable:
    """Every op of the catalogue.

    Args:
        npu: through which operators are called; nothing is called here.
        numerics: rounding mode.
        device: where it computes, for messages.
    """
    dtype = "float32" if numerics is Numerics.EXACT else "bfloat16"
    table = OpTable("ascend950", device=device, dtype=dtype)
    for family in (attention, compress, engram, indexer, kv, sampling, state):
        family.register(table)
    for bound in (MhcOps(npu), MoeOps(npu), NormOps(npu), QuantOps(npu)):
        bound.register(table)
    return table
