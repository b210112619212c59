"""Philox4x32-10: random numbers as a pure function of seed, sample, position, purpose, column."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_COLUMNS = 1024
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def _words(seed, sample, position, purpose, counter):
    """The four uint32 words of int32 counters [n]; seed, sample and position are int64 scalars."""
    c0 = counter.to(tl.uint32)
    zero = c0 * 0
    c1 = zero + position.to(tl.uint32)
    c2 = zero + sample.to(tl.uint32)
    c3 = zero + purpose.to(tl.uint32)
    k0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    m0 = zero + _MULTIPLIER_0
    m1 = zero + _MULTIPLIER_1
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(c0, m0)
        low_0 = c0 * m0
        high_1 = tl.umulhi(c2, m1)
        low_1 = c2 * m1
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = k0 + _KEY_STEP_0
        k1 = k1 + _KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def _unit_interval(word):
    return tl.minimum((word.to(tl.float32) + 0.5) * _UNIT, _BELOW_ONE)


@triton.jit
def philox_uniform(seed, sample, position, purpose, column):
    """fp32 numbers in (0, 1) at int32 columns [n]; seed, sample and position are int64 scalars."""
    c0, c1, c2, c3 = _words(seed, sample, position, purpose, column // 4)
    place = column % 4
    word = tl.where(place == 0, c0, tl.where(place == 1, c1, tl.where(place == 2, c2, c3)))
    return _unit_interval(word)


@triton.jit
def philox_block(seed, sample, position, purpose, start, COLUMNS: tl.constexpr):
    """`philox_uniform` of columns start .. start + COLUMNS, all four words of a counter used.

    `start` and COLUMNS are multiples of 4.
    """
    counter = start // 4 + tl.arange(0, COLUMNS // 4)
    c0, c1, c2, c3 = _words(seed, sample, position, purpose, counter)
    word = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    return _unit_interval(tl.reshape(word, [COLUMNS]))


@triton.jit(do_not_specialize=["purpose"])
def _uniform(seeds_ptr, samples_ptr, positions_ptr, out_ptr, purpose, num, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    u = philox_uniform(
        tl.load(seeds_ptr + row), tl.load(samples_ptr + row), tl.load(positions_ptr + row),
        purpose, column,
    )  # fmt: skip
    tl.store(out_ptr + row * num + column, u, mask=column < num)


def uniform(
    seeds: Tensor, sample_index: Tensor, positions: Tensor, purpose: int, num: int
) -> Tensor:
    """[N, num] fp32 uniform numbers of rows with int64 seeds, samples and positions [N].

    Args:
        purpose: last word of the counter.
        num: numbers per row, below 2^31.
    """
    out = torch.empty((seeds.shape[0], num), dtype=torch.float32, device=seeds.device)
    if out.numel():
        _uniform[(seeds.shape[0], triton.cdiv(num, _COLUMNS))](
            seeds.contiguous(), sample_index.contiguous(), positions.contiguous(), out, purpose,
            num, COLUMNS=min(_COLUMNS, triton.next_power_of_2(num)),
        )  # fmt: skip
    return out


def uniform_truth(seed: int, sample: int, position: int, purpose: int, column: int) -> float:
    """One number in plain integers."""
    mask = 0xFFFFFFFF
    c = [column // 4, position, sample, purpose]
    k = [seed & mask, (seed >> 32) & mask]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k[0], second & mask, (first >> 32) ^ c[3] ^ k[1], first & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    word = torch.tensor(c[column % 4], dtype=torch.int64).float()
    return float(torch.clamp((word + 0.5) * 2.0**-32, max=1.0 - 2.0**-24))


COMPILE_CASES = (
    CompileCase(
        "_uniform",
        {
            "seeds_ptr": "*i64", "samples_ptr": "*i64", "positions_ptr": "*i64",
            "out_ptr": "*fp32", "purpose": "i32", "num": "i32",
        },
        {"COLUMNS": _COLUMNS},
    ),
)  # fmt: skip
