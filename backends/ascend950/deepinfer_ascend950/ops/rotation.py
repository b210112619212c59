"""Rotation of interleaved pairs.

npu_rotary_mul is not used: for Ascend 950 the page of aclnnRotaryPositionEmbedding lists the
modes quarter and interleave-half only, and interleave is what V4.1 needs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, rope_table: Tensor, *, inverse: bool) -> Tensor:
    """x [n, ..., N] with the pairs of its last R dimensions rotated; x's dtype.

    Args:
        x: rows.
        positions: [n] int64, rows of the table.
        rope_table: [max_positions, R] fp32, cos of the R / 2 pairs, then sin.
        inverse: rotate back.
    """
    width = rope_table.shape[1]
    angles = rope_table.index_select(0, positions)
    angles = angles.view(angles.shape[0], *(1,) * (x.dim() - 2), width)
    cos, sin = angles.chunk(2, dim=-1)
    if inverse:
        sin = -sin
    tail = x[..., x.shape[-1] - width :].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((x[..., : x.shape[-1] - width], turned.flatten(-2).to(x.dtype)), dim=-1)
