"""Rotation of interleaved pairs inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(row_ptr, angles_ptr, column, inside, width, num_rotated, INVERSE: tl.constexpr):
    """fp32 values at `column` of a row whose last `num_rotated` columns are rotated pairs.

    The result is rounded to the row's dtype, as if it had been stored between. `angles_ptr` is
    the position's row of the table: cos of the pairs, then sin.
    """
    first = width - num_rotated
    own = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32)
    turns = inside & (column >= first)
    offset = column - first
    partner = tl.load(row_ptr + first + (offset ^ 1), mask=turns, other=0.0)
    pair = offset // 2
    cos = tl.load(angles_ptr + pair, mask=turns, other=1.0)
    sin = tl.load(angles_ptr + num_rotated // 2 + pair, mask=turns, other=0.0)
    if INVERSE:
        sin = -sin
    signed = tl.where(offset % 2 == 0, -sin, sin)
    turned = own * cos + partner.to(tl.float32) * signed
    value = tl.where(turns, turned, own)
    return value.to(row_ptr.dtype.element_ty).to(tl.float32)
