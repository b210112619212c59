"""Attention family on Triton kernels."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops import attention
from deepinfer_cuda_sm100.caches import record_rows
from deepinfer_kernels.attention import rope_triton, sparse_attention_triton


def rope(x: Tensor, positions: Tensor, rope_table: Tensor, *, inverse: bool) -> Tensor:
    return rope_triton.rope(x, positions, rope_table, inverse=inverse)


def sparse_attention(
    q: Tensor,
    window: RowCache,
    window_slots: Tensor,
    compressed: RowCache | None,
    compressed_slots: Tensor | None,
    *,
    sink: Tensor,
    scale: float,
) -> Tensor:
    if (compressed is None) != (compressed_slots is None):
        given = "compressed" if compressed_slots is None else "compressed_slots"
        absent = "compressed_slots" if compressed_slots is None else "compressed"
        raise ContractError(
            f"sparse_attention was given {given} but {absent} is None; give both, or neither for "
            "a layer that sees its window only"
        )
    return sparse_attention_triton.sparse_attention(
        q,
        record_rows(window).rows,
        window_slots,
        None if compressed is None else record_rows(compressed).rows,
        compressed_slots,
        sink=sink,
        scale=scale,
    )


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(attention.rope, reason=reason)(rope)
    table.implements(attention.sparse_attention, reason=reason)(sparse_attention)
