"""Quant family: products with packed weights, and the quantisers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as matmul

from deepinfer.device import formats
from deepinfer.device.handles import EmbeddingTable, GroupedWeight, LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import quant
from deepinfer_ascend950.handles import (
    Embedding,
    FloatLinear,
    GroupedBlocks,
    MxLinear,
    own_handle,
)
from deepinfer_ascend950.operators import NpuOperators


def embed(ids: Tensor, table: EmbeddingTable) -> Tensor:
    return own_handle(table, Embedding).rows.index_select(0, ids)


def linear_f32(x: Tensor, weight: LinearWeight) -> Tensor:
    return matmul(x.float(), own_handle(weight, FloatLinear).matrix_f32)


def quantize_q4_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    return formats.quantize_q4_ue8m0(x)


def quantize_q4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    return formats.quantize_q4_e4m3(x)


class QuantOps:
    """Products and quantisers that call operators."""

    def __init__(self, npu: NpuOperators) -> None:
        self._npu = npu

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        if isinstance(weight, MxLinear):
            if x.shape[0] == 0:  # the operator takes no empty tensor
                return x.new_empty((0, weight.out_features))
            codes, scales = self._npu.mx_quantize(x)
            product = self._npu.mx_matmul(codes, scales, weight.codes, weight.scales)
            return product.to(x.dtype)
        packed = own_handle(weight, FloatLinear)
        if x.dtype is packed.matrix.dtype:
            return matmul(x, packed.matrix)
        return matmul(x.float(), packed.matrix_f32).to(x.dtype)

    def grouped_linear(self, x: Tensor, weight: GroupedWeight) -> Tensor:
        blocks = own_handle(weight, GroupedBlocks).blocks
        if x.shape[0] == 0:
            return x.new_empty((0, blocks.shape[0], blocks.shape[2]))
        if x.dtype is torch.bfloat16:
            return self._npu.block_diagonal(x, blocks)
        # The operator may compute fp32 in HF32; torch's product obeys allow_hf32.
        return torch.bmm(x.transpose(0, 1), blocks).transpose(0, 1)

    def quantize_a8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.numel() == 0:
            return formats.quantize_a8(x)
        codes, scales = self._npu.mx_quantize(x)
        return codes, scales.flatten(-2)[..., : x.shape[-1] // formats.GROUP]

    def register(self, table: OpTable) -> None:
        """Add this family's implementations to `table`."""
        table.implements(quant.embed, reason="torch: a gather", layout="activation dtype")(embed)
        table.implements(
            quant.linear,
            reason="npu_dynamic_mx_quant + npu_quant_matmul; unquantised weights: torch",
            layout="A8 x W8: e4m3 [N, K] seen as [K, N], e8m0 [N, K/64, 2] seen as [K/64, N, 2], "
            "tile scales repeated; bf16 out",
        )(self.linear)
        table.implements(
            quant.linear_f32,
            reason="torch: no operator documents bf16 operands with fp32 output",
            layout="fp32, HF32 off; the weight is kept in fp32 as well",
        )(linear_f32)
        table.implements(
            quant.grouped_linear,
            reason="npu_transpose_batchmatmul; fp32: torch, whose HF32 can be turned off",
            layout="bf16 blocks [G, K, N], no transposition of x in memory",
        )(self.grouped_linear)
        table.implements(
            quant.quantize_a8,
            reason="npu_dynamic_mx_quant, scale_alg 1 with max_low_bound 1e-4",
            layout="e4m3, e8m0 pairs; the padding of an odd pair is cut off",
        )(self.quantize_a8)
        table.implements(
            quant.quantize_q4_ue8m0,
            reason="torch: npu_dynamic_mx_quant has this scale rule (scale_alg 2) but documents "
            "neither zero groups nor a floor",
            layout="E2M1 pairs, low half first; ue8m0",
        )(quantize_q4_ue8m0)
        table.implements(
            quant.quantize_q4_e4m3,
            reason="torch: no operator has e4m3 scales for 16 values",
            layout="E2M1 pairs, low half first; e4m3",
        )(quantize_q4_e4m3)
