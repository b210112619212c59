"""The random numbers: published vectors, the contract's bits, and separate streams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.device.ops.sampling import Purpose
from deepinfer_conformance.naive import sampling as naive
from deepinfer_reference.ops.philox import philox_block, philox_uniform, unit_interval


def _column(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_block_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (_column(word) for word in counter)
    result = philox_block((c0, c1, c2, c3), (_column(key[0]), _column(key[1])))
    assert tuple(int(word) for word in result) == words


def test_uniform_has_the_bits_of_the_contract() -> None:
    seeds = _column(0, -1, 1 << 40, -(2**63), 7)
    index = _column(0, 3, 0, 2**32 - 1, 1)
    positions = _column(0, 1_048_575, 5, 2**32 - 1, 9)
    for purpose in Purpose:
        expected = naive.philox_uniform(seeds, index, positions, purpose, 13)
        assert torch.equal(philox_uniform(seeds, index, positions, purpose, 13), expected)


def test_first_number_of_the_zero_counter_is_its_published_word() -> None:
    zero = _column(0)
    drawn = philox_uniform(zero, zero, zero, Purpose.SAMPLE, 1)
    assert drawn.item() == pytest.approx(0x6627E8D5 / 2**32, abs=2**-24)


def test_extreme_words_stay_inside_the_open_interval() -> None:
    assert unit_interval(_column(0, 0xFFFFFFFF)).tolist() == [2.0**-33, 1.0 - 2.0**-24]


def test_small_numbers_keep_all_bits() -> None:
    assert unit_interval(_column(1, 2)).tolist() == [1.5 * 2.0**-32, 2.5 * 2.0**-32]


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_every_bit_of_the_seed_counts(bit: int) -> None:
    seed = 1 << bit if bit < 63 else -(2**63)
    zeros = _column(0, 0)
    one, other = philox_uniform(_column(0, seed), zeros, zeros, Purpose.SAMPLE, 8)
    assert not (one == other).any()


def test_streams_of_purposes_positions_and_answers_are_apart() -> None:
    rows = [(7, 0, 5), (7, 1, 5), (7, 0, 6), (8, 0, 5)]
    seeds, index, positions = (_column(*column) for column in zip(*rows, strict=True))
    drawn = [philox_uniform(seeds, index, positions, purpose, 4) for purpose in Purpose]
    assert torch.cat(drawn).unique().numel() == len(rows) * len(Purpose) * 4


def test_a_longer_row_begins_with_the_shorter_one() -> None:
    seeds, zeros = _column(3, 4), _column(0, 0)
    long = philox_uniform(seeds, zeros, zeros, Purpose.ACCEPT, 10)
    assert torch.equal(long[:, :3], philox_uniform(seeds, zeros, zeros, Purpose.ACCEPT, 3))


def test_zero_rows_and_zero_numbers_are_legal() -> None:
    none = _column()
    assert philox_uniform(none, none, none, Purpose.SAMPLE, 5).shape == (0, 5)
    assert philox_uniform(_column(1), _column(0), _column(0), Purpose.SAMPLE, 0).shape == (1, 0)
