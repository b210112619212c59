"""Philox4x32-10 in int64 tensors: words of 32 bits, products wrap modulo 2^64."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.ops.sampling import Purpose

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_BELOW_ONE = 1.0 - 2.0**-24

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _product(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    # The product needs 64 bits: as int64 it may be negative, but its bits are right, and the
    # mask undoes the sign extension of the shift.
    wide = word * constant
    return (wide >> 32) & _WORD, wide & _WORD


def philox_block(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """The four words of one block.

    Args:
        counter: four int64 tensors in [0, 2^32) that broadcast against each other.
        key: two int64 tensors in [0, 2^32), broadcast likewise.

    Returns:
        Four int64 tensors in [0, 2^32), of the shape of all inputs broadcast.

    Source: Philox4x32-10 (SC11).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def unit_interval(words: Tensor) -> Tensor:
    """fp32 in (0, 1) for int64 words in [0, 2^32); small results keep all 32 bits."""
    return ((words.float() + 0.5) * 2.0**-32).clamp_max(_BELOW_ONE)


def philox_uniform(
    seeds: Tensor, sample_index: Tensor, positions: Tensor, purpose: Purpose, num: int
) -> Tensor:
    block = torch.arange((num + 3) // 4, device=seeds.device)
    counter = (
        block,
        positions.unsqueeze(1),
        sample_index.unsqueeze(1),
        torch.full_like(block, int(purpose)),
    )
    key = ((seeds & _WORD).unsqueeze(1), ((seeds >> 32) & _WORD).unsqueeze(1))
    return unit_interval(torch.stack(philox_block(counter, key), dim=-1).flatten(1)[:, :num])
