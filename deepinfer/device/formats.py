"""Number formats of the checkpoint and the caches: e4m3, E2M1 (FP4) and ue8m0 scales.

This is the canonical form that every backend's packed layouts convert from and to. All functions
are pure torch, take tensors on any device and never synchronise. A ue8m0 byte b means 2^(b-127).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
GROUP = 32
"""Group length of every ue8m0 scale along the last dimension."""
NVFP4_GROUP = 16
"""Group length of the compressed-KV record, whose scales are e4m3."""
A8_AMAX_FLOOR = 1e-4
Q4_UE8M0_AMAX_FLOOR = 6.0 * 2.0**-126
Q4_E4M3_AMAX_FLOOR = 6.0 * 2.0**-9
_WEIGHT_AMAX_FLOOR = 2.0**-100
# The fp32 factor 1/448 gives the same power of two as a division, for every amax.
_INV_E4M3_MAX = 1.0 / 448.0


def pow2ceil(x: Tensor) -> Tensor:
    """Smallest power of two >= x, evaluated on the bits of x (fp32, positive, normal)."""
    bits = x.view(torch.int32)
    return ((bits + 0x007FFFFF) & ~0x007FFFFF).view(torch.float32)


def pow2_to_ue8m0(scale: Tensor) -> Tensor:
    """Exponent byte (uint8) of fp32 powers of two."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def ue8m0_to_pow2(scale: Tensor) -> Tensor:
    """fp32 powers of two from ue8m0 bytes; byte 0 is 2^-127, a subnormal, 255 is NaN."""
    exponent = scale.to(torch.int32)
    normal = (exponent << 23).view(torch.float32)
    subnormal = torch.full_like(normal, 2.0**-127)
    value = torch.where(exponent == 0, subnormal, normal)
    return torch.where(exponent == 255, torch.full_like(value, float("nan")), value)


def _grouped(x: Tensor, group: int) -> Tensor:
    grouped: Tensor = x.float().unflatten(-1, (-1, group))
    return grouped


def _a8_scale(grouped: Tensor) -> Tensor:
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(A8_AMAX_FLOOR)
    return pow2ceil(amax * _INV_E4M3_MAX)


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations to e4m3 with one power-of-two scale per 32 along the last dimension.

    Args:
        x: [..., N] any float dtype, N a multiple of 32, finite.

    Returns:
        codes [..., N] float8_e4m3fn and scales [..., N / 32] uint8 (ue8m0).
    """
    grouped = _grouped(x, GROUP)
    scale = _a8_scale(grouped)
    codes = (grouped / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), pow2_to_ue8m0(scale.squeeze(-1))


def dequantize_a8(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 values [..., N] of e4m3 codes [..., N] and ue8m0 scales [..., N / 32]."""
    grouped: Tensor = codes.float().unflatten(-1, (-1, GROUP))
    return (grouped * ue8m0_to_pow2(scale).unsqueeze(-1)).flatten(-2)


def _pow2floor(x: Tensor) -> Tensor:
    """Power of two of |x|'s exponent, 0 for subnormals (fp32)."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _round_to_step(x: Tensor, binade: Tensor, mantissa_bits: int) -> Tensor:
    """Round fp32 x to multiples of binade * 2^-mantissa_bits, ties to even; |x| < 2 * binade.

    Adding 1.5 * 2^23 steps puts the step into the last mantissa bit, so that the fp32 addition
    itself rounds; far faster on a CPU than a cast to fp8 and back.
    """
    magic = binade * (1.5 * 2.0 ** (23 - mantissa_bits))
    return (x + magic) - magic


def round_trip_a8(x: Tensor) -> Tensor:
    """fp32 values that `quantize_a8` would store for x [..., N]; exactly representable in bf16.

    A zero may lose its sign. Works in the domain of x: the scale is a power of two.
    """
    grouped = _grouped(x, GROUP)
    smallest = _a8_scale(grouped) * 2.0**-6
    binade = torch.maximum(_pow2floor(grouped), smallest)
    return _round_to_step(grouped, binade, 3).flatten(-2)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value of fp32 x, ties to the even code, saturating at +-6; -0 keeps its sign."""
    magnitude = x.abs().clamp_max(E2M1_MAX)
    fine = torch.round(magnitude * 2.0) * 0.5
    middle = torch.round(magnitude)
    coarse = torch.round(magnitude * 0.5) * 2.0
    rounded = torch.where(magnitude < 2.0, fine, torch.where(magnitude < 4.0, middle, coarse))
    return torch.copysign(rounded, x)


def e2m1_to_codes(values: Tensor) -> Tensor:
    """4-bit codes (uint8) of fp32 values that lie on the E2M1 grid; bit 3 is the sign."""
    magnitude = values.abs()
    upper = torch.where(magnitude < 4.0, magnitude + 2.0, magnitude * 0.5 + 4.0)
    code = torch.where(magnitude < 2.0, magnitude * 2.0, upper).to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def codes_to_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of 4-bit codes (uint8)."""
    magnitude = (codes & 7).float()
    value = torch.where(
        magnitude < 4.0,
        magnitude * 0.5,
        torch.where(magnitude < 6.0, magnitude - 2.0, magnitude * 2.0 - 8.0),
    )
    return torch.where((codes & 8) != 0, -value, value)


def pack_e2m1(values: Tensor) -> Tensor:
    """Bytes [..., N / 2] of grid values [..., N]; even elements in the low nibble."""
    codes = e2m1_to_codes(values)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """fp32 grid values [..., 2 N] of bytes [..., N] (uint8 or int8)."""
    raw = packed.view(torch.uint8)
    return codes_to_e2m1(torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2))


def _q4_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    grouped = _grouped(x, GROUP)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(Q4_UE8M0_AMAX_FLOOR)
    scale = pow2ceil(amax / E2M1_MAX)
    return round_e2m1(grouped / scale), scale


def _q4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    grouped = _grouped(x, NVFP4_GROUP)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(Q4_E4M3_AMAX_FLOOR)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
    return round_e2m1(grouped / scale), scale


def quantize_q4_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., N] to E2M1 in groups of 32: bytes [..., N / 2], ue8m0 scales [..., N / 32]."""
    values, scale = _q4_ue8m0(x)
    return pack_e2m1(values.flatten(-2)), pow2_to_ue8m0(scale.squeeze(-1))


def dequantize_q4_ue8m0(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., N] of bytes [..., N / 2] and ue8m0 scales [..., N / 32]."""
    grouped: Tensor = unpack_e2m1(packed).unflatten(-1, (-1, GROUP))
    return (grouped * ue8m0_to_pow2(scale).unsqueeze(-1)).flatten(-2)


def round_trip_q4_ue8m0(x: Tensor) -> Tensor:
    """fp32 values that `quantize_q4_ue8m0` would store; exactly representable in bf16."""
    grouped = _grouped(x, GROUP)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(Q4_UE8M0_AMAX_FLOOR)
    binade = torch.maximum(_pow2floor(grouped), pow2ceil(amax / E2M1_MAX))
    return _round_to_step(grouped, binade, 1).flatten(-2)


def quantize_q4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., N] to E2M1 in groups of 16: bytes [..., N / 2], e4m3 scales [..., N / 16]."""
    values, scale = _q4_e4m3(x)
    return pack_e2m1(values.flatten(-2)), scale.squeeze(-1).to(torch.float8_e4m3fn)


def dequantize_q4_e4m3(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., N] of bytes [..., N / 2] and e4m3 scales [..., N / 16]."""
    grouped: Tensor = unpack_e2m1(packed).unflatten(-1, (-1, NVFP4_GROUP))
    return (grouped * scale.float().unsqueeze(-1)).flatten(-2)


def round_trip_q4_e4m3(x: Tensor) -> Tensor:
    """fp32 values that `quantize_q4_e4m3` would store; exactly representable in bf16.

    Not idempotent for small groups: pack from the stored codes, never from a second round trip.
    """
    values, scale = _q4_e4m3(x)
    return (values * scale).flatten(-2)


def quantize_tile32(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix [N, K] to e4m3 with one ue8m0 scale per 32 x 32 tile.

    Returns:
        codes [N, K] float8_e4m3fn and scales [ceil(N / 32), ceil(K / 32)] uint8.
    """
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % GROUP, 0, -rows % GROUP))
    tiles = padded.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    amax = tiles.abs().amax((1, 3), keepdim=True).clamp_min(_WEIGHT_AMAX_FLOOR)
    scale = pow2ceil(amax * _INV_E4M3_MAX)
    codes = (tiles / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = codes.flatten(2, 3).flatten(0, 1)[:rows, :cols]
    return codes.contiguous(), pow2_to_ue8m0(scale[:, 0, :, 0])


def dequantize_tile32(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 [N, K] of e4m3 codes [N, K] and ue8m0 scales [ceil(N / 32), ceil(K / 32)]."""
    rows, cols = codes.shape
    factor = ue8m0_to_pow2(scale)
    factor = factor.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :cols]
    return codes.float() * factor


def quantize_row32(table: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows [R, N] to e4m3 with one ue8m0 scale per 32 columns (Engram tables)."""
    grouped = _grouped(table, GROUP)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(_WEIGHT_AMAX_FLOOR)
    scale = pow2ceil(amax * _INV_E4M3_MAX)
    codes = (grouped / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), pow2_to_ue8m0(scale.squeeze(-1))
