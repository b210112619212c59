"""Confidence calibration recovers planted temperatures; its figures are what they are called."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_training import calibration


def rollouts(temperatures: list[float], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, G] that are too bold by these factors, and drafts accepted accordingly [N]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, len(temperatures), generator=generator) * 2
    right = torch.rand(logits.shape, generator=generator) < torch.sigmoid(logits)
    return logits * torch.tensor(temperatures), right.long().cumprod(1).sum(1)


def test_planted_temperatures_are_found_slot_by_slot() -> None:
    planted = [2.0, 0.5, 1.0]
    logits, accepted = rollouts(planted, 40_000)
    fitted = calibration.fit_temperatures(logits, accepted)
    for found, wanted in zip(fitted, planted, strict=True):
        assert abs(math.log(found / wanted)) < 0.25
    for slot in range(len(planted)):
        happened = (accepted > slot).float()
        before, after = (
            float(calibration.calibration_error(survival[:, slot], happened))
            for survival in (
                calibration.survivals(logits, [1.0] * len(planted)),
                calibration.survivals(logits, fitted),
            )
        )
        assert after < 0.02
        assert after < before


def test_calibration_error_of_a_constant_forecast_is_its_distance_from_the_rate() -> None:
    happened = torch.tensor([1.0, 0.0, 0.0, 0.0])
    error = calibration.calibration_error(torch.full((4,), 0.75), happened)
    assert float(error) == pytest.approx(0.5)
    # Two bins that are wrong in opposite directions do not cancel.
    both = calibration.calibration_error(torch.tensor([0.9, 0.1]), torch.tensor([0.0, 1.0]))
    assert float(both) == pytest.approx(0.9)


def test_auroc_counts_pairs_in_the_right_order_and_ties_by_half() -> None:
    happened = torch.tensor([True, False, True, False])
    assert calibration.auroc(torch.tensor([4.0, 1.0, 3.0, 2.0]), happened) == 1.0
    assert calibration.auroc(torch.tensor([1.0, 4.0, 2.0, 3.0]), happened) == 0.0
    assert calibration.auroc(torch.zeros(4), happened) == 0.5
    assert math.isnan(calibration.auroc(torch.zeros(2), torch.tensor([True, True])))


def test_mean_accepted_follows_the_rounds_that_decoding_makes() -> None:
    # Rounds start at 0, at 0 + 2 + 1, at 3 + 0 + 1: five positions, three rounds.
    accepted = torch.tensor([[2, 5, 5, 0, 1]])
    assert calibration.mean_accepted(accepted) == pytest.approx((2 + 0 + 1) / 3)
