"""Confidence calibration recovers planted temperatures; its figures are what they are called."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_training import calibration
from deepinfer_training.calibration import Rollouts
from deepinfer_training.fit_confidence import fit_head


def planted(temperatures: list[float], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, G] that are too bold by these factors, and drafts accepted accordingly [N]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, len(temperatures), generator=generator) * 2
    right = torch.rand(logits.shape, generator=generator) < torch.sigmoid(logits)
    return logits * torch.tensor(temperatures), right.long().cumprod(1).sum(1)


def test_planted_temperatures_are_found_slot_by_slot() -> None:
    temperatures = [2.0, 0.5, 1.0]
    logits, accepted = planted(temperatures, 40_000)
    fitted = calibration.fit_temperatures(logits, accepted, torch.full_like(accepted, 3))
    for found, wanted in zip(fitted, temperatures, strict=True):
        assert abs(math.log(found / wanted)) < 0.25
    for slot in range(len(temperatures)):
        happened = (accepted > slot).float()
        before, after = (
            float(calibration.calibration_error(survival[:, slot], happened))
            for survival in (
                calibration.survivals(logits, [1.0] * len(temperatures)),
                calibration.survivals(logits, fitted),
            )
        )
        assert after < 0.02
        assert after < before


def test_slots_beyond_the_answers_end_do_not_count() -> None:
    temperatures = [2.0, 0.5]
    logits, accepted = planted(temperatures, 20_000)
    # Half of the answers end before slot 1: what the head says there has no truth.
    left = torch.where(torch.arange(20_000) % 2 == 0, 2, 1)
    spoiled = torch.where(left == 1, accepted.clamp(max=1), accepted)
    spoiled_logits = logits.clone()
    spoiled_logits[left == 1, 1] = 50.0
    fitted = calibration.fit_temperatures(spoiled_logits, spoiled, left)
    for found, wanted in zip(fitted, temperatures, strict=True):
        assert abs(math.log(found / wanted)) < 0.25


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


def rollouts(accepted: list[list[int]], num_left: list[list[int]]) -> Rollouts:
    """Answers whose features say nothing; three slots."""
    shape = (len(accepted), len(accepted[0]), 3, 2)
    domains = torch.zeros(len(accepted), dtype=torch.int64)
    return Rollouts(torch.tensor(accepted), torch.tensor(num_left), torch.ones(shape), domains)


def test_mean_accepted_follows_the_rounds_that_decoding_makes() -> None:
    # Rounds start at 0, at 0 + 2 + 1 and at 3 + 0 + 1; the second answer ends after one token.
    made = rollouts([[2, 3, 3, 0, 1, 0], [0] * 6], [[3, 3, 3, 2, 1, 0], [0] * 6])
    assert calibration.mean_accepted(made.accepted, made.num_left) == pytest.approx((2 + 0 + 1) / 3)


def test_a_slot_is_judged_where_all_before_it_are_right_and_the_answer_goes_on() -> None:
    made = rollouts([[0, 2, 1]], [[3, 3, 1]])
    assert made.judged()[0].tolist() == [
        [True, False, False], [True, True, True], [True, False, False],
    ]  # fmt: skip
    assert made.right()[0].tolist() == [
        [False, False, False], [True, True, False], [True, False, False],
    ]  # fmt: skip


def test_the_fitted_head_foretells_acceptance_and_stays_where_nothing_is_learnt() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(800, 20, 3, 4, generator=generator)
    wanted = torch.tensor([[1.5, -1.0, 0.5, 0.0]])
    right = torch.rand(features.shape[:3], generator=generator) < torch.sigmoid(
        features @ wanted.squeeze(0)
    )
    accepted = right.long().cumprod(-1).sum(-1)
    made = Rollouts(accepted, torch.full_like(accepted, 3), features, torch.arange(800) % 2)
    start = torch.tensor([[0.0, 0.0, 0.0, 3.0]])
    head = fit_head(made, start)
    assert (head - wanted)[0, :3].abs().max() < 0.05
    # A pull towards the start remains.
    assert 0.01 < abs(float(head[0, 3])) < 0.1
    before, after = (
        calibration.measure(made, made, each, ("even", "odd")) for each in (start, head)
    )
    assert max(after["ece_after"]) < 0.03  # type: ignore[call-overload]
    assert after["auroc"] > before["auroc"]  # type: ignore[operator]
    # A feature that is always 0 keeps its weight.
    features[..., 3] = 0.0
    assert float(fit_head(made, start)[0, 3]) == 3.0
