"""Compress family: pooling pairs of tokens into one latent."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.comparison import Ulp
from deepinfer.device.op import op


@op(family="compress", compare={"out": Ulp(), "ring": Ulp()}, mutates=("ring",))
def compress_pair(
    values_gates: Tensor,
    previous_row: Tensor,
    ring_read: Tensor,
    ring_write: Tensor,
    emit_rows: Tensor,
    *,
    ring: Tensor,
    like: Tensor,
) -> Tensor:
    """Pool the pairs that end in this step: per-channel softmax over the two gates.

    Args:
        values_gates: [T, 2 C] fp32, projected value and gate of every row.
        previous_row: [T] int64, row of the position before in this step; -1: in the ring.
        ring_read: [T] int64, ring row of the position before; used where previous_row is -1.
        ring_write: [T] int64, ring row that keeps this row's value and gate; -1 skips.
        emit_rows: [E] int64, rows that hold the second token of a pair; -1 is padding.
        ring: [slots, 2 C] fp32; read first, then changed in place.
        like: any tensor of the activation dtype: dtype of the result.

    Returns:
        [E, C] activation dtype: w0 * v0 + w1 * v1 in fp32, cast once (the norm follows);
        padding rows are unspecified but finite.

    Source: compressor of ratio 2.
    """
    raise NotImplementedError
