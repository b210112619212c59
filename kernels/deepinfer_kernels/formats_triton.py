"""Number formats inside kernels: ue8m0, e4m3 and E2M1, on fp32 values and bit patterns.

All functions take and return blocks; arithmetic is fp32. Power-of-two scales are inverted on
their bits, so that scaling is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
INV_E4M3_MAX = tl.constexpr(1.0 / 448.0)
A8_AMAX_FLOOR = tl.constexpr(1e-4)
Q4_UE8M0_AMAX_FLOOR = tl.constexpr(6.0 * 2.0**-126)
Q4_E4M3_AMAX_FLOOR = tl.constexpr(6.0 * 2.0**-9)
E2M1_BIAS = tl.constexpr(2.0**126)
ROUND_MAGIC = tl.constexpr(1.5 * 2.0**23)
"""Adding it puts the unit into the last mantissa bit: the addition itself rounds to even."""


@triton.jit
def pow2ceil(x):
    """Smallest power of two >= x (fp32, positive, normal), on its bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x007FFFFF) & -0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_pow2(scale):
    """1 / scale for a power of two between 2^-126 and 2^126, on its bits."""
    bits = scale.to(tl.int32, bitcast=True)
    return (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_byte(scale):
    """Exponent byte (uint8) of a power of two."""
    return (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def ue8m0_value(byte):
    """fp32 power of two of an exponent byte; 0 is 2^-127, 255 is NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_half_even(x):
    """x rounded to the nearest integer, ties to even; |x| below 2^22."""
    return (x + ROUND_MAGIC) - ROUND_MAGIC


@triton.jit
def e2m1_code(x):
    """4-bit code (int32) of fp32 x: nearest E2M1 value, ties to the even code, saturating."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    fine = round_half_even(magnitude * 2.0)
    middle = round_half_even(magnitude) + 2.0
    coarse = round_half_even(magnitude * 0.5) + 4.0
    code = tl.where(magnitude < 2.0, fine, tl.where(magnitude < 4.0, middle, coarse))
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return code.to(tl.int32) | sign


@triton.jit
def e2m1_value(code):
    """fp32 value of a 4-bit code (int32)."""
    # Exponent and mantissa in the places of fp32's; the product moves the exponent's bias, and
    # makes the smallest value, a denormal there, right as well.
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * E2M1_BIAS


@triton.jit
def a8_scale(groups):
    """fp32 power-of-two scale of every group of activations: groups [..., 32] -> [..., 1]."""
    amax = tl.max(tl.abs(groups), axis=-1, keep_dims=True)
    return pow2ceil(tl.maximum(amax, A8_AMAX_FLOOR) * INV_E4M3_MAX)


@triton.jit
def e4m3_code(x):
    """e4m3 of fp32 x, saturating, as float8e4nv; NaN stays NaN."""
    # By default the device's minimum and maximum drop NaN, and the interpreter's do not.
    lower = tl.maximum(x, -E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(lower, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def q4_ue8m0_scale(groups):
    """fp32 power-of-two scale of every group of 32: groups [..., 32] -> [..., 1]."""
    amax = tl.max(tl.abs(groups), axis=-1, keep_dims=True)
    return pow2ceil(tl.div_rn(tl.maximum(amax, Q4_UE8M0_AMAX_FLOOR), 6.0))


@triton.jit
def q4_e4m3_scale(groups):
    """e4m3 scale of every group of 16, as float8e4nv: groups [..., 16] -> [..., 1]."""
    amax = tl.max(tl.abs(groups), axis=-1, keep_dims=True)
    return e4m3_code(tl.div_rn(tl.maximum(amax, Q4_E4M3_AMAX_FLOOR), 6.0))


@triton.jit
def pack_nibbles(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes [ROWS, WIDTH / 2] (uint8) of codes [ROWS, WIDTH]; even elements in the low nibble."""
    low, high = tl.split(tl.reshape(codes, [ROWS, WIDTH // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)
