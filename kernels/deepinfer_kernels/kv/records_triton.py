"""Cache records inside kernels: rows of codes followed by their scales, written and read.

`plain`: fp32 values. `mxfp8`: e4m3 codes, then ue8m0 scales per 32 (528 bytes for 512 values).
`nvfp4`: packed E2M1, then e4m3 scales per 16 (288 bytes). `mxfp4`: packed E2M1, then ue8m0 scales
per 32 (68 bytes for 128 values). The width of rows that are read is a constant, so that the
compiler sees how far rows are aligned: 16 bytes at a time, 4 where records are 68 bytes long.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels.formats_triton import (
    a8_scale,
    e2m1_code,
    e2m1_value,
    e4m3_code,
    inverse_pow2,
    pack_nibbles,
    q4_e4m3_scale,
    q4_ue8m0_scale,
    ue8m0_byte,
    ue8m0_value,
)


@triton.jit
def store_record(row_ptr, values, width, RECORD: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise one row of fp32 values [BLOCK] (zero from `width` on) and store it at row_ptr."""
    if RECORD == "plain":
        column = tl.arange(0, BLOCK)
        tl.store(row_ptr + column, values, mask=column < width)
    elif RECORD == "mxfp8":
        groups = tl.reshape(values, [BLOCK // 32, 32])
        group = tl.arange(0, BLOCK // 32)[:, None]
        scale = a8_scale(groups)
        code = e4m3_code(groups * inverse_pow2(scale)).to(tl.uint8, bitcast=True)
        column = group * 32 + tl.arange(0, 32)[None, :]
        tl.store(row_ptr + column, code, mask=column < width)
        tl.store(row_ptr + width + group, ue8m0_byte(scale), mask=group < width // 32)
    elif RECORD == "mxfp4":
        groups = tl.reshape(values, [BLOCK // 32, 32])
        group = tl.arange(0, BLOCK // 32)[:, None]
        scale = q4_ue8m0_scale(groups)
        packed = pack_nibbles(e2m1_code(groups * inverse_pow2(scale)), BLOCK // 32, 32)
        column = group * 16 + tl.arange(0, 16)[None, :]
        tl.store(row_ptr + column, packed, mask=column < width // 2)
        tl.store(row_ptr + width // 2 + group, ue8m0_byte(scale), mask=group < width // 32)
    else:
        groups = tl.reshape(values, [BLOCK // 16, 16])
        group = tl.arange(0, BLOCK // 16)[:, None]
        scale = q4_e4m3_scale(groups)
        factor = tl.broadcast_to(scale.to(tl.float32), groups.shape)
        packed = pack_nibbles(e2m1_code(tl.div_rn(groups, factor)), BLOCK // 16, 16)
        column = group * 8 + tl.arange(0, 8)[None, :]
        tl.store(row_ptr + column, packed, mask=column < width // 2)
        byte = scale.to(tl.uint8, bitcast=True)
        tl.store(row_ptr + width // 2 + group, byte, mask=group < width // 16)


@triton.jit
def _record_starts(base, row, BYTES: tl.constexpr):
    """Pointers to records of BYTES.

    The offset's alignment is stated, because Triton 3.6 gets it wrong for some rows: a sum such as
    block * 16 + entry % 16 counts as a multiple of 16, and 68-byte records were read 16 bytes at a
    time, which a GPU refuses as a misaligned address.
    """
    ALIGNED: tl.constexpr = BYTES & -BYTES
    return base + tl.multiple_of(row * BYTES, ALIGNED)


@triton.jit
def _load_scales(start, present, BYTES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """[ROWS, COUNT] bytes (int32) of records of BYTES from byte FIRST on; 0 past their end.

    Four or eight bytes are loaded as one word where records are aligned to it: single bytes cannot
    be copied to shared memory ahead of their use.
    """
    byte = tl.arange(0, COUNT)[None, :]
    if (COUNT == 4 or COUNT == 8) and FIRST % COUNT == 0 and BYTES % COUNT == 0:
        WORD: tl.constexpr = tl.int32 if COUNT == 4 else tl.int64
        words = tl.load((start + FIRST).to(tl.pointer_type(WORD)), mask=present, other=0)
        return ((words[:, None] >> (8 * byte)) & 255).to(tl.int32)
    else:
        inside = present[:, None] & (FIRST + byte < BYTES)
        return tl.load(start[:, None] + FIRST + byte, mask=inside, other=0).to(tl.int32)


@triton.jit
def load_mxfp8(
    base, row, present, WIDTH: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK] values of `mxfp8` rows from column FIRST on; zero where there is nothing."""
    start = _record_starts(base, row, WIDTH + WIDTH // 32)
    group = tl.arange(0, BLOCK // 32)
    column = FIRST + group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    codes = tl.load(
        start[:, None, None] + column, mask=present[:, None, None] & (column < WIDTH), other=0
    )
    scale = _load_scales(start, present, WIDTH + WIDTH // 32, WIDTH + FIRST // 32, BLOCK // 32)
    value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * ue8m0_value(scale)[:, :, None]
    return tl.reshape(value, [ROWS, BLOCK]).to(DTYPE)


@triton.jit
def load_fp4(
    base, row, present, WIDTH: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK] values of `mxfp4` (GROUP 32) or `nvfp4` (GROUP 16) rows from FIRST on."""
    start = _record_starts(base, row, WIDTH // 2 + WIDTH // GROUP)
    group = tl.arange(0, BLOCK // GROUP)
    column = FIRST // 2 + group[None, :, None] * (GROUP // 2)
    column += tl.arange(0, GROUP // 2)[None, None, :]
    packed = tl.load(
        start[:, None, None] + column,
        mask=present[:, None, None] & (column < WIDTH // 2),
        other=0,
    ).to(tl.int32)
    scale = _load_scales(
        start, present, WIDTH // 2 + WIDTH // GROUP, WIDTH // 2 + FIRST // GROUP, BLOCK // GROUP
    )
    if GROUP == 32:
        factor = ue8m0_value(scale)[:, :, None]
    else:
        factor = scale.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)[:, :, None]
    low = e2m1_value(packed & 15) * factor
    high = e2m1_value(packed >> 4) * factor
    return tl.reshape(tl.join(low, high), [ROWS, BLOCK]).to(DTYPE)


@triton.jit
def round_trip_mxfp4(values, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 values [ROWS, BLOCK] as an `mxfp4` record gives them back."""
    groups = tl.reshape(values, [ROWS * BLOCK // 32, 32])
    scale = q4_ue8m0_scale(groups)
    held = e2m1_value(e2m1_code(groups * inverse_pow2(scale))) * scale
    return tl.reshape(held, [ROWS, BLOCK])
