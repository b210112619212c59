"""Reference of the quant family: dequantise, multiply in fp32, cast once."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device import formats
from deepinfer.device.handles import EmbeddingTable, GroupedWeight, LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import quant
from deepinfer_reference.gemm import invariant_matmul
from deepinfer_reference.handles import DenseEmbedding, DenseGrouped, DenseLinear, own_handle


def embed(ids: Tensor, table: EmbeddingTable) -> Tensor:
    return own_handle(table, DenseEmbedding).rows.index_select(0, ids)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    packed = own_handle(weight, DenseLinear)
    values = formats.round_trip_a8(x) if packed.quantizes_input else x.float()
    return invariant_matmul(values, packed.matrix).to(x.dtype)


def linear_f32(x: Tensor, weight: LinearWeight) -> Tensor:
    return invariant_matmul(x.float(), own_handle(weight, DenseLinear).matrix)


def grouped_linear(x: Tensor, weight: GroupedWeight) -> Tensor:
    blocks = own_handle(weight, DenseGrouped).blocks
    num_rows = x.shape[0]
    # Same reasons as in gemm.py: 16 rows at least, whole tiles, inner pieces.
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -num_rows % 16))
    by_group = padded.transpose(0, 1)
    product = torch.bmm(by_group[..., :512], blocks[:, :512])
    for start in range(512, blocks.shape[1], 512):
        stop = start + 512
        product += torch.bmm(by_group[..., start:stop], blocks[:, start:stop])
    return product.transpose(0, 1)[:num_rows].to(x.dtype)


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    return formats.quantize_a8(x)


def quantize_q4_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    return formats.quantize_q4_ue8m0(x)


def quantize_q4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    return formats.quantize_q4_e4m3(x)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(quant.embed)(embed)
    table.implements(quant.linear)(linear)
    table.implements(quant.linear_f32)(linear_f32)
    table.implements(quant.grouped_linear)(grouped_linear)
    table.implements(quant.quantize_a8)(quantize_a8)
    table.implements(quant.quantize_q4_ue8m0)(quantize_q4_ue8m0)
    table.implements(quant.quantize_q4_e4m3)(quantize_q4_e4m3)
