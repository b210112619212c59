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
def mxfp8_tile(
    base,
    scales,
    row,
    inside,
    k0,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[ROWS, BK] of e4m3 codes (uint8) with ue8m0 scales [.., WIDTH / 32]."""
    group = tl.arange(0, BK // 32)
    k = k0 + group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    codes = tl.load(
        base + row[:, None, None] * WIDTH + k,
        mask=inside[:, None, None] & (k < WIDTH),
        other=0,
    )
    column = k0 // 32 + group
    scale = tl.load(
        scales + row[:, None] * (WIDTH // 32) + column[None, :],
        mask=inside[:, None] & (column < WIDTH // 32)[None, :],
        other=0,
    )
    value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * ue8m0_value(scale)[:, :, None]
    return tl.reshape(value.to(DTYPE), [ROWS, BK])


@triton.jit
def mxfp4_tile(
    base, scales, row, inside, k0, WIDTH: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """[ROWS, BK] of packed E2M1 (uint8 [.., WIDTH / 2]) with ue8m0 scales [.., WIDTH / 32]."""
    byte = k0 // 2 + tl.arange(0, BK // 2)
    packed = tl.load(
        base + row[:, None] * (WIDTH // 2) + byte[None, :],
        mask=inside[:, None] & (byte < WIDTH // 2)[None, :],
        other=0,
    ).to(tl.int32)
    column = k0 // 32 + tl.arange(0, BK // 32)
    scale = tl.load(
        scales + row[:, None] * (WIDTH // 32) + column[None, :],
        mask=inside[:, None] & (column < WIDTH // 32)[None, :],
        other=0,
    )
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), [ROWS, BK // 32, 32])
    value = e2m1_value(codes) * ue8m0_value(scale)[:, :, None]
    return tl.reshape(value.to(DTYPE), [ROWS, BK])


@triton.jit
def operand_tile(
    base, scales, row, inside, k0, WIDTH: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
    BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[ROWS, BK] of an operand stored as `plain` floats, `mxfp8` or `mxfp4`."""
    if FORMAT == "mxfp8":
        return mxfp8_tile(base, scales, row, inside, k0, WIDTH, ROWS, BK, DTYPE)
    elif FORMAT == "mxfp4":
        return mxfp4_tile(base, scales, row, inside, k0, WIDTH, ROWS, BK, DTYPE)
    else:
        return plain_tile(base, row, inside, k0, WIDTH, BK, DTYPE)


@triton.jit
def activation_tile(
    base, scales, row, inside, k0, WIDTH: tl.constexpr, FORMAT: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """[rows, BK] of activations stored as `plain` floats or `mxfp8`.

    Scales are read once per value, without a third dimension: Triton 3.6 fails on sm_100 when the
    right operand of a product is reshaped from tiles of few rows.
    """
    k = k0 + tl.arange(0, BK)
    mask = inside[:, None] & (k < WIDTH)[None, :]
    value = tl.load(base + row[:, None] * WIDTH + k[None, :], mask=mask, other=0)
    if FORMAT == "mxfp8":
        at = row[:, None] * (WIDTH // 32) + (k // 32)[None, :]
        scale = ue8m0_value(tl.load(scales + at, mask=mask, other=0))
        return (value.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale).to(DTYPE)
    else:
        return value.to(DTYPE)


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
