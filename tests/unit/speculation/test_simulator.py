"""The planner on the published figures' scenario: what it verifies, and that it never loses."""

from __future__ import annotations

import pytest

from deepinfer.speculation.planner import Scheduling
from deepinfer.speculation.simulator import Outcome, Scenario, simulate

# Accepted drafts of the fixed length scatter by 0.005 at 60 sequences and this many rounds.
NUM_STEPS = 1500


def outcomes(
    num_requests: int, *, falls_back: bool = True, num_steps: int = NUM_STEPS
) -> tuple[Outcome, Outcome]:
    """Fixed and asynchronous."""
    fixed = simulate(Scenario(), num_requests, num_steps, scheduling=None)
    scheduling = Scheduling.ASYNCHRONOUS
    planned = simulate(
        Scenario(), num_requests, num_steps, scheduling=scheduling, falls_back=falls_back
    )
    return fixed, planned


def gain(fixed: Outcome, planned: Outcome) -> float:
    return planned.tokens_per_s / fixed.tokens_per_s - 1.0


def test_at_60_sequences_the_published_figures_come_out() -> None:
    fixed, planned = outcomes(60)
    assert fixed.num_verified == 5.0
    assert 3.25 < fixed.num_accepted < 3.35
    assert 3.4 <= planned.num_verified <= 3.8
    assert 3.15 <= planned.num_accepted <= 3.25
    assert 0.04 <= gain(fixed, planned) <= 0.07


def test_at_96_sequences_more_is_gained() -> None:
    assert gain(*outcomes(96)) >= 0.075


@pytest.mark.parametrize("num_requests", [8, 16])
def test_few_sequences_fall_back_to_the_fixed_length_and_lose_nothing(num_requests: int) -> None:
    fixed, planned = outcomes(num_requests, num_steps=6000)
    assert gain(fixed, planned) >= -0.001
    assert planned.planned_share < 0.05


def test_without_the_fall_back_few_sequences_lose_what_was_published() -> None:
    """-1.5 % was; the test above means something only because planning does lose here."""
    assert -0.02 < gain(*outcomes(16, falls_back=False, num_steps=6000)) < -0.008


@pytest.mark.parametrize("num_requests", [60, 256])
def test_where_the_host_is_the_limit_nothing_is_lost(num_requests: int) -> None:
    """The device would be faster with fewer rows, and the round no shorter."""
    scenario = Scenario(host_us=40_000.0)
    fixed = simulate(scenario, num_requests, 1200, scheduling=None)
    planned = simulate(scenario, num_requests, 1200, scheduling=Scheduling.ASYNCHRONOUS)
    assert gain(fixed, planned) >= -0.001
    # By turns the device's time counts beside the host's, and less is to be gained.
    by_turns = simulate(scenario, num_requests, 1200, scheduling=Scheduling.SYNCHRONOUS)
    assert by_turns.tokens_per_s < planned.tokens_per_s


def test_a_host_that_is_nearly_the_limit_leaves_a_part_of_the_gain() -> None:
    """Fixed steps take 22.7 ms and the best ones 20.3."""
    free, bound = Scenario(), Scenario(host_us=21_500.0)
    gains = []
    for scenario in (free, bound):
        fixed = simulate(scenario, 96, NUM_STEPS, scheduling=None)
        planned = simulate(scenario, 96, NUM_STEPS, scheduling=Scheduling.ASYNCHRONOUS)
        gains.append(gain(fixed, planned))
    assert 0.01 < gains[1] < gains[0] - 0.01


def test_a_run_is_its_seeds() -> None:
    first, second, other = (
        simulate(Scenario(), 4, 50, scheduling=Scheduling.SYNCHRONOUS, seed=seed)
        for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other
