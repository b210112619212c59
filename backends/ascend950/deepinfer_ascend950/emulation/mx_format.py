"""Number formats of the MX operators: E2M1 bytes, e8m0 scale bytes, pairs of scales.

Written from the OCP Microscaling Formats specification 1.0, sections 5.2 to 5.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E8M0_BIAS = 127


def e2m1_codes(values: Tensor) -> Tensor:
    """4-bit codes (uint8) nearest to fp32 values; ties go to the even code, beyond 6 saturates."""
    midpoints = torch.tensor(_E2M1_MIDPOINTS, device=values.device)
    magnitude = values.abs().contiguous()
    below = torch.bucketize(magnitude, midpoints)
    above = torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(below % 2 == 0, below, above).to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """fp32 values of 4-bit codes (uint8)."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=codes.device)
    magnitude = magnitudes[(codes & 7).long()]
    return torch.where(codes >= 8, -magnitude, magnitude)


def packed_e2m1(values: Tensor) -> Tensor:
    """Bytes [..., N / 2] of the codes nearest to values [..., N]; the first in the low half."""
    codes = e2m1_codes(values)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpacked_e2m1(packed: Tensor) -> Tensor:
    """fp32 values [..., 2 N] of bytes [..., N]."""
    raw = packed.view(torch.uint8)
    return e2m1_values(torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2))


def e8m0_values(scale: Tensor) -> Tensor:
    """fp32 powers of two of scale bytes."""
    exponent = scale.view(torch.uint8).to(torch.int32) - E8M0_BIAS
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def paired_scales(scales: Tensor) -> Tensor:
    """Scale bytes [..., G] as [..., ceil(G / 2), 2], a zero byte filling the last pair."""
    odd = scales.shape[-1] % 2
    padded = torch.nn.functional.pad(scales, (0, odd))
    return torch.stack((padded[..., 0::2], padded[..., 1::2]), dim=-1)


def spread_scales(paired: Tensor, size: int) -> Tensor:
    """fp32 scale of each of `size` elements from bytes [..., P, 2]: [..., size], 32 to a scale."""
    return e8m0_values(paired.flatten(-2)).repeat_interleave(32, dim=-1)[..., :size]
