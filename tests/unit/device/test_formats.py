"""Codecs of e4m3, E2M1 and ue8m0 against the published tables and their own round trips."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.device import formats

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]
Restore = Callable[[Tensor, Tensor], Tensor]
RoundTrip = Callable[[Tensor], Tensor]

RECORDS: dict[str, tuple[Quantise, Restore, RoundTrip]] = {
    "a8": (formats.quantize_a8, formats.dequantize_a8, formats.round_trip_a8),
    "q4_ue8m0": (
        formats.quantize_q4_ue8m0, formats.dequantize_q4_ue8m0, formats.round_trip_q4_ue8m0,
    ),
    "q4_e4m3": (
        formats.quantize_q4_e4m3, formats.dequantize_q4_e4m3, formats.round_trip_q4_e4m3,
    ),
}  # fmt: skip
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _values(*shape: int, seed: int = 0, spread: float = 8.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** (spread * torch.randn(shape[0], 1, generator=generator))
    return torch.randn(shape, generator=generator) * scale


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0),
     (6.0, 6.0), (100.0, 6.0), (0.26, 0.5), (0.24, 0.0), (5.01, 6.0)],
)  # fmt: skip
def test_e2m1_rounds_ties_to_the_even_code_and_saturates(value: float, rounded: float) -> None:
    assert formats.round_e2m1(torch.tensor([value, -value])).tolist() == [rounded, -rounded]


def test_e2m1_codes_are_the_table() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    expected = E2M1 + [-value for value in E2M1]
    assert formats.codes_to_e2m1(codes).tolist() == expected
    assert torch.equal(formats.e2m1_to_codes(formats.codes_to_e2m1(codes)), codes)


def test_even_elements_lie_in_the_low_nibble() -> None:
    assert formats.pack_e2m1(torch.tensor([0.5, -6.0])).tolist() == [0xF1]
    assert formats.unpack_e2m1(torch.tensor([0xF1], dtype=torch.uint8)).tolist() == [0.5, -6.0]


def test_packed_bytes_may_be_signed() -> None:
    signed = torch.tensor([0xF1], dtype=torch.uint8).view(torch.int8)
    assert formats.unpack_e2m1(signed).tolist() == [0.5, -6.0]


def test_ue8m0_bytes_and_their_values() -> None:
    scale = formats.ue8m0_to_pow2(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert scale[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert bool(scale[4].isnan())
    powers = torch.tensor([2.0**-126, 1.0, 2.0**100])
    assert formats.pow2_to_ue8m0(powers).tolist() == [1, 127, 227]


@pytest.mark.parametrize(
    ("value", "power"),
    [(1.0, 1.0), (1.0000001, 2.0), (0.75, 1.0), (3.0, 4.0), (2.0**-126, 2.0**-126)],
)
def test_pow2ceil(value: float, power: float) -> None:
    assert formats.pow2ceil(torch.tensor([value])).item() == power


@pytest.mark.parametrize(
    ("amax", "byte"), [(448.0, 127), (448.5, 128), (224.0, 126), (1e-4, 105), (0.0, 105)]
)
def test_a8_scale(amax: float, byte: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 9] = -amax
    assert formats.quantize_a8(x)[1].item() == byte


@pytest.mark.parametrize(("amax", "byte"), [(6.0, 127), (6.1, 128), (3.0, 126), (0.0, 1)])
def test_q4_ue8m0_scale(amax: float, byte: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 9] = -amax
    assert formats.quantize_q4_ue8m0(x)[1].item() == byte


@pytest.mark.parametrize(
    ("amax", "scale"), [(6.0, 1.0), (2.0, 0.34375), (0.0, 2.0**-9), (9000.0, 448.0)]
)
def test_q4_e4m3_scale(amax: float, scale: float) -> None:
    x = torch.zeros(1, 16)
    x[0, 9] = -amax
    assert formats.quantize_q4_e4m3(x)[1].float().item() == scale


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("spread", [0.0, 8.0, 20.0])
def test_round_trip_is_quantise_and_restore(name: str, spread: float) -> None:
    quantise, restore, round_trip = RECORDS[name]
    x = _values(64, 96, spread=spread)
    x[3, :32] = 0.0
    assert torch.equal(round_trip(x), restore(*quantise(x)))


@pytest.mark.parametrize("name", RECORDS)
def test_round_trip_is_exact_in_bf16(name: str) -> None:
    kept = RECORDS[name][2](_values(64, 96))
    assert torch.equal(kept.bfloat16().float(), kept)


@pytest.mark.parametrize(
    ("name", "step"), [("a8", 1 / 14), ("q4_ue8m0", 1 / 3), ("q4_e4m3", 1 / 5)]
)
def test_round_trip_error_is_within_half_a_step_of_the_group(name: str, step: float) -> None:
    x = _values(64, 96, spread=1.0)
    group = 16 if name == "q4_e4m3" else 32
    error = (RECORDS[name][2](x) - x).abs().unflatten(-1, (-1, group)).amax(-1)
    assert bool((error <= step * x.abs().unflatten(-1, (-1, group)).amax(-1)).all())


@pytest.mark.parametrize("name", ["a8", "q4_ue8m0"])
@given(seed=st.integers(0, 2**32 - 1))
def test_power_of_two_records_are_idempotent(name: str, seed: int) -> None:
    round_trip = RECORDS[name][2]
    once = round_trip(_values(4, 64, seed=seed, spread=2.0))
    assert torch.equal(round_trip(once), once)


@pytest.mark.parametrize("name", RECORDS)
def test_zero_rows(name: str) -> None:
    quantise, restore, _ = RECORDS[name]
    assert restore(*quantise(torch.zeros(0, 64))).shape == (0, 64)


def test_negative_zero_keeps_its_sign_in_the_codes() -> None:
    x = torch.full((1, 32), -0.0)
    assert set(formats.quantize_a8(x)[0].view(torch.uint8).flatten().tolist()) == {0x80}
    assert set(formats.quantize_q4_ue8m0(x)[0].flatten().tolist()) == {0x88}


@pytest.mark.parametrize("shape", [(32, 32), (40, 70), (1, 1), (33, 64), (64, 31)])
def test_tile_scales_cover_partial_tiles(shape: tuple[int, int]) -> None:
    weight = _values(*shape, spread=1.0)
    codes, scale = formats.quantize_tile32(weight)
    assert codes.shape == shape
    assert scale.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    restored = formats.dequantize_tile32(codes, scale)
    bound = weight.abs().max() / 14.0
    assert bool(((restored - weight).abs() <= bound).all())


def test_tiles_have_their_own_scale() -> None:
    weight = torch.ones(64, 64)
    weight[32:, :32] = 2.0**20
    scale = formats.quantize_tile32(weight)[1].int()
    assert (scale[1, 0] - scale[0, 0]).item() == 20
    assert scale[0, 1] == scale[0, 0] == scale[1, 1]


def test_engram_rows_have_scales_below_the_activation_floor() -> None:
    table = _values(4, 64, spread=0.0) * 2.0**-40
    restored = formats.dequantize_a8(*formats.quantize_row32(table))
    assert bool(((restored - table).abs() <= table.abs().amax() / 14.0).all())
    assert bool((restored != 0).any())
