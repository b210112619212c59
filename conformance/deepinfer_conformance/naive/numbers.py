"""Number formats one scalar at a time: bf16, fp32, e4m3, E2M1 and power-of-two scales.

Grids are written out from their definition and searched; nothing here manipulates bits.
"""

from __future__ import annotations

import bisect
import math

import torch
from torch import Tensor

NAN = math.nan


def _round_significand(value: float, bits: int, smallest: int) -> float:
    """Nearest multiple of the last place, ties to even; `smallest` is the least exponent."""
    if value == 0.0 or math.isnan(value) or math.isinf(value):
        return value
    _, exponent = math.frexp(value)
    place = 2.0 ** max(exponent - bits, smallest)
    return math.copysign(round(abs(value) / place) * place, value)


def to_bf16(value: float) -> float:
    """Nearest bf16, ties to even."""
    return _round_significand(value, 8, -133)


def to_fp32(value: float) -> float:
    """Nearest fp32, ties to even."""
    return _round_significand(value, 24, -149)


def to_activation(value: float, like: Tensor) -> float:
    """Nearest value of the activation dtype of `like`; exact numerics keep float64."""
    return to_bf16(value) if like.dtype is torch.bfloat16 else value


def is_normative(activation: Tensor) -> bool:
    """bf16 activations mean normative numerics, fp32 ones exact."""
    return activation.dtype is torch.bfloat16


E4M3_GRID = [
    (mantissa if exponent == 0 else 8 + mantissa) * 2.0 ** (max(exponent, 1) - 10)
    for exponent in range(16)
    for mantissa in range(8)
][:127]
"""Values of the codes 0 .. 126; 127 is NaN, bit 7 the sign."""
E2M1_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Values of the codes 0 .. 7; bit 3 is the sign."""


def _nearest_code(magnitude: float, grid: list[float]) -> int:
    """Code of the nearest grid value; halfway goes to the even code, above the end to the last."""
    upper = bisect.bisect_left(grid, magnitude)
    if upper == 0:
        return 0
    if upper == len(grid):
        return upper - 1
    below, above = magnitude - grid[upper - 1], grid[upper] - magnitude
    if below == above:
        return upper if upper % 2 == 0 else upper - 1
    return upper if above < below else upper - 1


def e4m3_code(value: float) -> int:
    """Byte of the nearest e4m3 value, saturating at +-448."""
    sign = 128 if math.copysign(1.0, value) < 0 else 0
    return sign | _nearest_code(abs(value), E4M3_GRID)


def e4m3_value(code: int) -> float:
    """Value of an e4m3 byte."""
    if code & 127 == 127:
        return NAN
    return -E4M3_GRID[code & 127] if code & 128 else E4M3_GRID[code & 127]


def e2m1_code(value: float) -> int:
    """Four-bit code of the nearest E2M1 value, saturating at +-6."""
    sign = 8 if math.copysign(1.0, value) < 0 else 0
    return sign | _nearest_code(abs(value), E2M1_GRID)


def e2m1_value(code: int) -> float:
    """Value of a four-bit E2M1 code."""
    return -E2M1_GRID[code & 7] if code & 8 else E2M1_GRID[code & 7]


def ue8m0_value(byte: int) -> float:
    """Value of a ue8m0 scale byte."""
    return NAN if byte == 255 else 2.0 ** (byte - 127)


def _exponent_at_least(value: float) -> int:
    """Smallest e with 2^e >= value, for value > 0."""
    fraction, exponent = math.frexp(value)
    return exponent - 1 if fraction == 0.5 else exponent


def _largest(group: list[float], floor: float) -> float:
    return max(floor, *(abs(value) for value in group))


def a8_group(group: list[float]) -> tuple[list[int], int]:
    """e4m3 bytes and ue8m0 byte of one group of 32."""
    exponent = _exponent_at_least(_largest(group, to_fp32(1e-4)) / 448.0)
    return [e4m3_code(value / 2.0**exponent) for value in group], exponent + 127


def q4_ue8m0_group(group: list[float]) -> tuple[list[int], int]:
    """E2M1 codes and ue8m0 byte of one group of 32."""
    exponent = _exponent_at_least(_largest(group, 6.0 * 2.0**-126) / 6.0)
    return [e2m1_code(value / 2.0**exponent) for value in group], exponent + 127


def q4_e4m3_group(group: list[float]) -> tuple[list[int], int]:
    """E2M1 codes and e4m3 scale byte of one group of 16; quotients are rounded to fp32."""
    scale_code = e4m3_code(to_fp32(_largest(group, 6.0 * 2.0**-9) / 6.0))
    scale = e4m3_value(scale_code)
    return [e2m1_code(to_fp32(value / scale)) for value in group], scale_code


def _groups(row: list[float], length: int) -> list[list[float]]:
    return [row[start : start + length] for start in range(0, len(row), length)]


def a8_round_trip(row: list[float]) -> list[float]:
    """What e4m3 with ue8m0 scales per 32 gives back; NaN throughout for a row with NaN."""
    if any(math.isnan(value) for value in row):
        return [NAN] * len(row)
    result: list[float] = []
    for group in _groups(row, 32):
        codes, scale = a8_group(group)
        result += [e4m3_value(code) * ue8m0_value(scale) for code in codes]
    return result


def q4_ue8m0_round_trip(row: list[float]) -> list[float]:
    """What E2M1 with ue8m0 scales per 32 gives back; NaN throughout for a row with NaN."""
    if any(math.isnan(value) for value in row):
        return [NAN] * len(row)
    result: list[float] = []
    for group in _groups(row, 32):
        codes, scale = q4_ue8m0_group(group)
        result += [e2m1_value(code) * ue8m0_value(scale) for code in codes]
    return result


def q4_e4m3_round_trip(row: list[float]) -> list[float]:
    """What E2M1 with e4m3 scales per 16 gives back; NaN throughout for a row with NaN."""
    if any(math.isnan(value) for value in row):
        return [NAN] * len(row)
    result: list[float] = []
    for group in _groups(row, 16):
        codes, scale = q4_e4m3_group(group)
        result += [e2m1_value(code) * e4m3_value(scale) for code in codes]
    return result
