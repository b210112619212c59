"""The table of all ops; made without a device for `deepinfer backends --explain --assume`."""

from __future__ import annotations

from deepinfer.device.errors import CapabilityError
from deepinfer.device.hookspecs import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpChoice, OpTable
from deepinfer_ascend950.operators import NpuOperators
from deepinfer_ascend950.ops import attention, compress, engram, indexer, kv, sampling, spec, state
from deepinfer_ascend950.ops.mhc import MhcOps
from deepinfer_ascend950.ops.moe import MoeOps
from deepinfer_ascend950.ops.norm import NormOps
from deepinfer_ascend950.ops.quant import QuantOps
from deepinfer_ascend950.options import parse_options


def build_op_table(npu: NpuOperators, numerics: Numerics, *, device: str) -> OpTable:
    """Every op of the catalogue.

    Args:
        npu: through which operators are called; nothing is called here.
        numerics: rounding mode.
        device: where it computes, for messages.
    """
    dtype = "float32" if numerics is Numerics.EXACT else "bfloat16"
    table = OpTable("ascend950", device=device, dtype=dtype)
    for family in (attention, compress, engram, indexer, kv, sampling, spec, state):
        family.register(table)
    for bound in (MhcOps(npu), MoeOps(npu), NormOps(npu), QuantOps(npu)):
        bound.register(table)
    return table


def plan(config: BackendConfig) -> list[OpChoice]:
    """What would be used on an NPU.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """
    parse_options(config.options)
    table = build_op_table(NpuOperators(_no_device), config.numerics, device="npu (assumed)")
    return list(table.explain())


def _no_device(operator: str, *args: object, **kwargs: object) -> object:
    raise CapabilityError(f"{operator}: a plan names operators, it does not call them")
