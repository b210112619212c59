"""Philox4x32-10 on int64, which holds the products of 32-bit words."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.ops.sampling import Purpose

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BELOW_ONE = 1.0 - 2.0**-24


def _high_low(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of a product; int64 wraps, but no bit of it is lost."""
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD


def philox_uniform(
    seeds: Tensor, sample_index: Tensor, positions: Tensor, purpose: Purpose, num: int
) -> Tensor:
    purposes = torch.full_like(seeds, int(purpose))
    return uniform(seeds, sample_index, positions, purposes, num)


def uniform(
    seeds: Tensor, sample_index: Tensor, positions: Tensor, purposes: Tensor, num: int
) -> Tensor:
    """`philox_uniform` with a purpose [N] int64 for each row: [N, num] fp32."""
    block = torch.arange(-(-num // 4), device=seeds.device).unsqueeze(0)
    rows = torch.zeros_like(seeds).unsqueeze(1)
    c0, c1 = block + rows, positions.unsqueeze(1) + torch.zeros_like(block)
    c2, c3 = sample_index.unsqueeze(1) + torch.zeros_like(block), rows + purposes.unsqueeze(1)
    c3 = c3 + torch.zeros_like(block)
    k0, k1 = (seeds & _WORD).unsqueeze(1), ((seeds >> 32) & _WORD).unsqueeze(1)
    for _ in range(_ROUNDS):
        high_0, low_0 = _high_low(c0, _MULTIPLIERS[0])
        high_1, low_1 = _high_low(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    words = torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :num]
    return ((words.float() + 0.5) * 2.0**-32).clamp_max(_BELOW_ONE)
