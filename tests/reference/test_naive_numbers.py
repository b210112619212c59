"""The scalar quantisers of the naive truths against published tables and hand-made values."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_conformance.naive import numbers


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
def test_e2m1_ties_go_to_the_even_code(value: float, rounded: float) -> None:
    assert numbers.e2m1_value(numbers.e2m1_code(value)) == rounded
    assert numbers.e2m1_value(numbers.e2m1_code(-value)) == -rounded


def test_e2m1_saturates_and_keeps_the_sign_of_zero() -> None:
    assert numbers.e2m1_value(numbers.e2m1_code(100.0)) == 6.0
    assert numbers.e2m1_code(-0.0) == 8


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0x01, 2.0**-9),
        (0x07, 7 * 2.0**-9),
        (0x08, 2.0**-6),
        (0x38, 1.0),
        (0x7E, 448.0),
        (0xB8, -1.0),
    ],
)
def test_e4m3_codes_have_their_published_values(code: int, value: float) -> None:
    assert numbers.e4m3_value(code) == value
    assert numbers.e4m3_code(value) == code


def test_e4m3_code_127_is_nan() -> None:
    assert math.isnan(numbers.e4m3_value(0x7F))
    assert math.isnan(numbers.e4m3_value(0xFF))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(2.0**-10, 0.0), (3 * 2.0**-10, 2.0**-8), (1.0625, 1.0), (1.1875, 1.25), (432.0, 448.0),
     (17.0, 16.0), (19.0, 20.0)],
)  # fmt: skip
def test_e4m3_ties_go_to_the_even_code(value: float, rounded: float) -> None:
    assert numbers.e4m3_value(numbers.e4m3_code(value)) == rounded


def test_every_e4m3_code_is_its_own_nearest() -> None:
    codes = [code for code in range(256) if code & 127 != 127]
    assert [numbers.e4m3_code(numbers.e4m3_value(code)) for code in codes] == codes


def test_bf16_rounding_equals_the_hardware_format() -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(2000, generator=generator) * 2.0 ** torch.arange(-100, 100, 0.1)
    expected = values.bfloat16().double().tolist()
    assert [numbers.to_bf16(value) for value in values.double().tolist()] == expected


@pytest.mark.parametrize(("amax", "byte"), [(448.0, 127), (448.5, 128), (224.0, 126), (0.0, 105)])
def test_a8_scale_is_the_smallest_power_of_two_that_fits(amax: float, byte: int) -> None:
    _, scale = numbers.a8_group([amax] + [0.0] * 31)
    assert scale == byte


@pytest.mark.parametrize(("amax", "byte"), [(6.0, 127), (6.1, 128), (3.0, 126), (0.0, 1)])
def test_q4_ue8m0_scale_is_the_smallest_power_of_two_that_fits(amax: float, byte: int) -> None:
    _, scale = numbers.q4_ue8m0_group([amax] + [0.0] * 31)
    assert scale == byte


def test_q4_e4m3_scale_is_the_rounded_sixth_of_the_largest_value() -> None:
    codes, scale = numbers.q4_e4m3_group([2.0, -1.0] + [0.0] * 14)
    assert numbers.e4m3_value(scale) == 0.34375  # nearest e4m3 to 1/3
    assert numbers.e2m1_value(codes[0]) == 6.0
    assert numbers.e2m1_value(codes[1]) == -3.0


def test_q4_e4m3_scale_is_capped() -> None:
    _, scale = numbers.q4_e4m3_group([9000.0] + [0.0] * 15)
    assert numbers.e4m3_value(scale) == 448.0


def test_ue8m0_extremes() -> None:
    assert numbers.ue8m0_value(0) == 2.0**-127
    assert numbers.ue8m0_value(254) == 2.0**127
    assert math.isnan(numbers.ue8m0_value(255))


def test_round_trip_of_a_row_with_nan_is_nan() -> None:
    assert all(map(math.isnan, numbers.a8_round_trip([0.0] * 31 + [math.nan])))
