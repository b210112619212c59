"""Scores and their standard errors."""

from __future__ import annotations

import math
import random

import pytest

from deepinfer.evaluation.score import ratio, share


def test_share_and_its_error() -> None:
    value, error = share([True] * 30 + [False] * 10)
    assert value == 0.75
    assert error == pytest.approx(math.sqrt(0.75 * 0.25 / 40), rel=0.02)


@pytest.mark.parametrize("success", [True, False])
def test_error_of_a_uniform_share_does_not_vanish(success: bool) -> None:
    value, error = share([success] * 64)
    assert value == float(success)
    assert 0.005 < error < 0.02


def test_ratio_is_of_the_sums() -> None:
    value, _ = ratio([1.0, 9.0], [1.0, 4.0])
    assert value == 2.0
    assert ratio([3.0], [2.0]) == (1.5, None)


def test_error_of_a_ratio_is_the_spread_of_repeated_draws() -> None:
    r = random.Random(1)

    def draw() -> tuple[float, float]:
        sizes = [r.uniform(1.0, 3.0) for _ in range(60)]
        value, error = ratio([size * r.gauss(2.0, 0.5) for size in sizes], sizes)
        assert error is not None
        return value, error

    values, errors = zip(*(draw() for _ in range(400)), strict=True)
    mean = math.fsum(values) / 400
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / 399)
    assert math.fsum(errors) / 400 == pytest.approx(spread, rel=0.1)
