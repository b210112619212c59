"""Reference of the attention family: gather rows, one softmax, two batched products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.device.errors import ContractError
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops import attention
from deepinfer_reference.caches import dense_rows
from deepinfer_reference.gemm import batched_matmul, in_whole_vectors, round_to

# Keys per row are padded to this: a row's exponentials fill whole vectors, and products over 8
# columns sum in another order than wider ones.
KEY_TILE = 32
# Rows gathered at a time are bounded, so that a long prefill chunk needs no more memory than this.
_MAX_GATHERED_VALUES = 1 << 25


def rotate(x: Tensor, positions: Tensor, rope_table: Tensor, *, inverse: bool) -> Tensor:
    """x [n, ..., N] with the interleaved pairs of its last R dimensions rotated; x's dtype."""
    width = rope_table.shape[1]
    half = width // 2
    angles = rope_table.index_select(0, positions)
    shape = (angles.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    cos, sin = angles[:, :half].view(shape), angles[:, half:].view(shape)
    if inverse:
        sin = -sin
    tail = x[..., -width:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), dim=-1)


def rope(x: Tensor, positions: Tensor, rope_table: Tensor, *, inverse: bool) -> Tensor:
    return rotate(x, positions, rope_table, inverse=inverse)


def _attend(q: Tensor, keys: Tensor, absent: Tensor, sink: Tensor, scale: float) -> Tensor:
    scores = batched_matmul(q.float(), keys.transpose(1, 2)) * scale
    scores = scores.masked_fill_(absent.unsqueeze(1), -torch.inf)
    # A row without entries has maximum -inf; 0 keeps its exponentials at zero, not NaN.
    top = scores.amax(-1, keepdim=True)
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    p = torch.exp(scores - top)
    sink_part = in_whole_vectors(torch.exp, sink - top.squeeze(-1)).unsqueeze(-1)
    total = p.sum(-1, keepdim=True) + sink_part
    return batched_matmul(round_to(p, q.dtype), keys) / total


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
        names = ("compressed_slots", "compressed")
        given, absent_name = names if compressed is None else names[::-1]
        raise ContractError(
            f"sparse_attention was given {given} but {absent_name} is None; give both, or neither "
            "for a layer that sees its window only"
        )
    num_rows, _, width = q.shape
    num_keys = window_slots.shape[1]
    if compressed_slots is not None:
        num_keys += compressed_slots.shape[1]
    step = max(1, _MAX_GATHERED_VALUES // (num_keys * width))
    pieces = []
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        slots = window_slots[rows]
        keys = dense_rows(window).gather(slots)
        if compressed is not None and compressed_slots is not None:
            chosen = compressed_slots[rows]
            keys = torch.cat((keys, dense_rows(compressed).gather(chosen)), dim=1)
            slots = torch.cat((slots, chosen), dim=1)
        missing = -slots.shape[1] % KEY_TILE
        slots, keys = pad(slots, (0, missing), value=-1), pad(keys, (0, 0, 0, missing))
        absent = slots < 0
        # Absent keys are multiplied by p = 0; a poisoned row there must not turn that into NaN.
        keys = keys.masked_fill_(absent.unsqueeze(-1), 0.0)
        pieces.append(_attend(q[rows], keys, absent, sink, scale).to(q.dtype))
    return torch.cat(pieces) if pieces else q.clone()


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(attention.rope)(rope)
    table.implements(attention.sparse_attention)(sparse_attention)
