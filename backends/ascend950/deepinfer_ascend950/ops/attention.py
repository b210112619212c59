"""Attention family: gathered rows, one softmax with a sink, two batched products.

npu_sparse_flash_attention is not used: it takes one set of keys, V4.1 joins two; its page names
no sink, and the 512-dimensional records are not its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops import attention
from deepinfer_ascend950.caches import byte_rows
from deepinfer_ascend950.ops.rotation import rotate

# Rows gathered at a time are bounded: 2^27 fp32 values are 512 MiB.
_MAX_GATHERED_VALUES = 1 << 27


def rope(x: Tensor, positions: Tensor, rope_table: Tensor, *, inverse: bool) -> Tensor:
    return rotate(x, positions, rope_table, inverse=inverse)


def _attend(q: Tensor, keys: Tensor, absent: Tensor, sink: Tensor, scale: float) -> Tensor:
    scores = torch.bmm(q.float(), keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(absent.unsqueeze(1), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    # A row without entries has maximum -inf; with 0 its exponentials are zero instead of NaN.
    top = torch.where(top == -torch.inf, 0.0, top)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - top)
    return torch.bmm(p.to(q.dtype).float(), keys) / total


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
        raise ContractError(
            "sparse_attention: compressed and compressed_slots belong together, but "
            f"{'compressed' if compressed is None else 'compressed_slots'} is None; give both, or "
            "neither for a layer that sees its window only"
        )
    num_rows, _, width = q.shape
    window_rows = byte_rows(window)
    num_keys = window_slots.shape[1]
    if compressed_slots is not None:
        num_keys += compressed_slots.shape[1]
    step = max(1, _MAX_GATHERED_VALUES // (num_keys * width))
    pieces = []
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        slots = window_slots[rows]
        keys = window_rows.gather(slots)
        if compressed is not None and compressed_slots is not None:
            chosen = compressed_slots[rows]
            keys = torch.cat((keys, byte_rows(compressed).gather(chosen)), dim=1)
            slots = torch.cat((slots, chosen), dim=1)
        absent = slots < 0
        # p is zero for an absent key, but zero times a poisoned row is NaN.
        keys = keys.masked_fill(absent.unsqueeze(-1), 0.0)
        pieces.append(_attend(q[rows], keys, absent, sink, scale).to(q.dtype))
    return torch.cat(pieces) if pieces else torch.empty_like(q)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(
        attention.rope,
        reason="torch: npu_rotary_mul documents no interleaved mode for Ascend 950",
        layout="fp32 arithmetic on the last R values",
    )(rope)
    table.implements(
        attention.sparse_attention,
        reason="torch: the sparse attention operators take one set of keys or the V4 record",
        layout="rows gathered from 528 B and 288 B records to fp32; P rounded to the dtype of q",
    )(sparse_attention)
