"""Thin bindings from op contracts to kernels, one module per family."""

from __future__ import annotations

import torch

from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpTable
from deepinfer_cuda_sm100.ops import (
    attention,
    compress,
    engram,
    indexer,
    kv,
    mhc,
    moe,
    norm,
    quant,
    sampling,
    spec,
    state,
)
from deepinfer_cuda_sm100.runtime import CudaRuntime

_FAMILIES = (
    attention, compress, engram, indexer, kv, mhc, moe, norm, quant, sampling, spec, state,
)  # fmt: skip


def _where(runtime: CudaRuntime) -> str:
    if runtime.interprets:
        return "Triton kernel, interpreted on the CPU"
    major, minor = torch.cuda.get_device_capability(runtime.device)
    return f"Triton kernel on sm_{major}{minor}"


def build_op_table(numerics: Numerics, runtime: CudaRuntime) -> OpTable:
    """The backend's implementations of every primitive op."""
    dtype = "float32" if numerics is Numerics.EXACT else "bfloat16"
    table = OpTable("cuda_sm100", device=str(runtime.device), dtype=dtype)
    for family in _FAMILIES:
        family.register(table, _where(runtime))
    return table
