"""Attention family: rotation and sparse attention over window and compressed rows."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.comparison import ATTENTION, Ulp
from deepinfer.device.handles import RowCache
from deepinfer.device.op import op


@op(family="attention", compare=Ulp())
def rope(x: Tensor, positions: Tensor, rope_table: Tensor, *, inverse: bool) -> Tensor:
    """Rotate interleaved pairs of the last R dimensions; the rest passes through.

    Args:
        x: [T, H, N] activation dtype.
        positions: [T] int64, rows of `rope_table`.
        rope_table: [max_positions, R] fp32, cos of the R / 2 pairs, then sin.
        inverse: rotate back (attention output).

    Returns:
        [T, H, N] in x's dtype, fp32 arithmetic, one cast.
    """
    raise NotImplementedError


@op(family="attention", compare=ATTENTION)
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
    """One softmax over gathered window rows, gathered compressed rows and a sink; K equals V.

    Args:
        q: [T, H, C] activation dtype, rotated.
        window: rows of width C.
        window_slots: [T, W] int64; -1 absent.
        compressed: rows of width C, or None for window-only layers.
        compressed_slots: [T, K] int64; -1 absent; None together with `compressed`.
        sink: [H] fp32 logit per head; joins the denominator only, unscaled.
        scale: factor of the dot products.

    Returns:
        [T, H, C] in q's dtype. With m the maximum over all entries of the row,
        p = exp(s - m); denominator sum p + exp(sink - m) in fp32; normative numerics round p
        to bf16 for the product with V.

    Contract: a row without any entry (padding) gives zeros; entries are not de-duplicated.
    Source: CSA2 attention.
    """
    raise NotImplementedError
