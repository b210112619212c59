"""Reference of the quant family: dequantise, multiply in fp32, cast once."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device import formats
from deepinfer.device.handles import EmbeddingTable, GroupedWeight, LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import quant
from deepinfer_reference.gemm import batched_matmul, invariant_matmul, pad_rows
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
    product = batched_matmul(pad_rows(x.float()).transpose(0, 1), blocks)
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
