"""What plans would have yielded: against the same counted by hand, and by chance."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.speculation.foregone_plans import ForegonePlans

SURVIVAL = np.array([[0.9, 0.8], [0.5, 0.1]], dtype=np.float32)


def test_few_rounds_say_nothing() -> None:
    tested = ForegonePlans()
    for _ in range(7):
        tested.add(1, SURVIVAL, np.array([0, 2]))
    assert (tested.correction, tested.error) == (1.0, 0.0)


def test_tokens_that_a_plan_keeps_are_those_of_the_drafts_it_verifies() -> None:
    tested = ForegonePlans()
    for _ in range(8):
        tested.add(3, SURVIVAL, np.array([1, 2]))
    # Kept are both drafts of the first request and one of the second: 2 + 2 of 2 + 3 tokens
    # came, 2 + 2.2 of 2 + 2.3 were expected.
    assert tested.correction == pytest.approx((4 / 5) / (4.2 / 4.3))


@pytest.mark.parametrize("scale", [1.0, 0.6])
def test_right_confidences_need_no_correction_and_false_ones_do(scale: float) -> None:
    """Scaled ones say that later drafts are worth less than they are: a plan loses more."""
    generator = np.random.default_rng(2)
    corrections = []
    errors = []
    for _ in range(60):
        tested = ForegonePlans()
        for _ in range(16):
            confidences = generator.beta(1.8, 0.2, (64, 4)).astype(np.float32)
            accepted = (generator.random((64, 4)) < confidences).cumprod(axis=1).sum(axis=1)
            told = (confidences * np.float32(scale)).cumprod(axis=1)
            tested.add(128, told, accepted)
        corrections.append(tested.correction)
        errors.append(tested.error)
    mean, spread = float(np.mean(corrections)), float(np.std(corrections))
    if scale == 1.0:
        assert mean == pytest.approx(1.0, abs=3 * spread / np.sqrt(60))
        # Luck comes in runs: a draft that is lost takes those behind it along.
        assert spread / 2.5 < np.mean(errors) < 2.5 * spread
    else:
        assert mean < 0.9
