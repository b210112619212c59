"""Quant family on Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.handles import EmbeddingTable, GroupedWeight, LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import quant
from deepinfer_cuda_sm100.handles import (
    PackedEmbedding,
    PackedGrouped,
    PackedLinear,
    own_handle,
)
from deepinfer_kernels.quant import quantize_triton
from deepinfer_kernels.quant.gemm_triton import Operand, gemm


def input_operand(x: Tensor, *, quantizes: bool, block_scaled: bool = False) -> Operand:
    """Activations as an operand: as they are, or quantised to e4m3 groups.

    Only block-scaled products take the codes; the others take the values, which bf16 holds.
    """
    if not quantizes:
        return Operand("plain", x.contiguous(), None)
    if not block_scaled:
        return Operand("plain", quantize_triton.round_a8(x), None)
    codes, scales = quantize_triton.quantize_a8(x)
    return Operand("mxfp8", codes.view(torch.uint8), scales)


def embed(ids: Tensor, table: EmbeddingTable) -> Tensor:
    return own_handle(table, PackedEmbedding).rows.index_select(0, ids)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    packed = own_handle(weight, PackedLinear)
    return gemm(
        input_operand(x, quantizes=packed.quantizes_input, block_scaled=packed.block_scaled),
        packed.operand,
        x.dtype,
        block_scaled=packed.block_scaled,
    )


def linear_f32(x: Tensor, weight: LinearWeight) -> Tensor:
    operand = own_handle(weight, PackedLinear).operand
    return gemm(input_operand(x, quantizes=False), operand, torch.float32)


def grouped_linear(x: Tensor, weight: GroupedWeight) -> Tensor:
    operand = own_handle(weight, PackedGrouped).operand
    return gemm(input_operand(x, quantizes=False), operand, x.dtype)


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_triton.quantize_a8(x)


def quantize_q4_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_triton.quantize_q4_ue8m0(x)


def quantize_q4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_triton.quantize_q4_e4m3(x)


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(quant.embed, reason="torch index_select on the device: a plain gather")(embed)
    table.implements(quant.linear, reason=reason)(linear)
    table.implements(quant.linear_f32, reason=reason)(linear_f32)
    table.implements(quant.grouped_linear, reason=reason)(grouped_linear)
    table.implements(quant.quantize_a8, reason=reason)(quantize_a8)
    table.implements(quant.quantize_q4_ue8m0, reason=reason)(quantize_q4_ue8m0)
    table.implements(quant.quantize_q4_e4m3, reason=reason)(quantize_q4_e4m3)
