"""Tiles of packed operands, dequantised in registers.

Every value of e4m3 or E2M1 times its power-of-two scale is exact in bf16, so a tile is either
bf16 (products on tensor cores, accumulated in fp32) or fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels.formats_triton import e2m1_value, ue8m0_value


@triton.jit
def plain_tile(base, row, inside, k0, WIDTH: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr):
    """[rows, BK] of a row-major float matrix whose rows have `width` values."""
    k = k0 + tl.arange(0, BK)
    mask = inside[:, None] & (k < WIDTH)[None, :]
    return tl.load(base + row[:, None] * WIDTH + k[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def weight_codes(
    base, row, inside, k0, WIDTH: tl.constexpr, FORMAT: tl.constexpr, BK: tl.constexpr
):
    """Bytes of a quantised tile as `weight_values` takes them.

    [rows, BK / 32, 32] of `mxfp8`, [rows, BK / 2] of `mxfp4`: shapes that are dequantised where
    they lie, in the registers of the product.
    """
    if FORMAT == "mxfp4":
        return code_tile(base, row, inside, k0, WIDTH, FORMAT, BK)
    else:
        group = tl.arange(0, BK // 32)
        k = k0 + group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
        return tl.load(
            base + row[:, None, None] * WIDTH + k,
            mask=inside[:, None, None] & (k < WIDTH),
            other=0,
        )


@triton.jit
def weight_values(
    codes, scales, FORMAT: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr
):
    """[ROWS, BK] of codes as `weight_codes` loads them and ue8m0 scales [ROWS, BK / 32] (uint8)."""
    factor = ue8m0_value(scales)[:, :, None]
    if FORMAT == "mxfp4":
        packed = codes.to(tl.int32)
        pairs = tl.reshape(tl.join(packed & 15, packed >> 4), [ROWS, BK // 32, 32])
        value = e2m1_value(pairs) * factor
    else:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor
    return tl.reshape(value.to(DTYPE), [ROWS, BK])


@triton.jit
def code_tile(base, row, inside, k0, WIDTH: tl.constexpr, FORMAT: tl.constexpr, BK: tl.constexpr):
    """Bytes of a quantised operand: [rows, BK] of `mxfp8`, [rows, BK / 2] of `mxfp4`."""
    if FORMAT == "mxfp4":
        byte = k0 // 2 + tl.arange(0, BK // 2)
        mask = inside[:, None] & (byte < WIDTH // 2)[None, :]
        return tl.load(base + row[:, None] * (WIDTH // 2) + byte[None, :], mask=mask, other=0)
    else:
        k = k0 + tl.arange(0, BK)
        mask = inside[:, None] & (k < WIDTH)[None, :]
        return tl.load(base + row[:, None] * WIDTH + k[None, :], mask=mask, other=0)


@triton.jit
def scale_tile(scales, row, inside, k0, WIDTH: tl.constexpr, BK: tl.constexpr):
    """[rows, BK / 32] ue8m0 scales (uint8) of a quantised operand."""
    column = k0 // 32 + tl.arange(0, BK // 32)
    mask = inside[:, None] & (column < WIDTH // 32)[None, :]
    return tl.load(scales + row[:, None] * (WIDTH // 32) + column[None, :], mask=mask, other=0)
