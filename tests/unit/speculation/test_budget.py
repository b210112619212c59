"""The choice of K against all choices there are, and its prefix property."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.speculation.budget import (
    Budget,
    Survival,
    best_budget,
    early_stop_budget,
    expected_tokens,
    foreseen_stop_budget,
    lower_envelope,
)
from deepinfer.speculation.cost_tables import CostTables, Times

CONFIDENCES = st.one_of(st.floats(0.0, 1.0, width=32), st.sampled_from([0.0, 0.25, 0.5, 1.0]))


@st.composite
def batches(draw: st.DrawFn, max_requests: int = 4, max_drafts: int = 3) -> Survival:
    """[R, D] survivals of a few requests, with ties and zeros."""
    shape = draw(st.integers(1, max_requests)), draw(st.integers(1, max_drafts))
    values = draw(st.lists(CONFIDENCES, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.array(values, dtype=np.float32).reshape(shape).cumprod(axis=1, dtype=np.float32)


@st.composite
def step_times(draw: st.DrawFn, count: int, *, convex: bool = False) -> Times:
    """[count] times that do not fall: any, or convex ones."""
    rises = draw(st.lists(st.floats(0.0, 10.0), min_size=count - 1, max_size=count - 1))
    flats = draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))
    rises = (
        sorted(rises) if convex else [rise * flat for rise, flat in zip(rises, flats, strict=True)]
    )
    times: Times = draw(st.floats(1.0, 50.0)) + np.concatenate(([0.0], np.cumsum(rises)))
    return times


def exhaustive(survival: Survival, times: Times) -> float:
    """The best tokens per time over all numbers of drafts of every request."""
    num_requests, num_drafts = survival.shape
    best: float = max(
        (num_requests + sum(float(row[:n].sum(dtype=np.float64)) for row, n in
                            zip(survival, lengths, strict=True))) / times[sum(lengths)]
        for lengths in itertools.product(range(num_drafts + 1), repeat=num_requests)
    )  # fmt: skip
    return best


def rate(budget: Budget) -> float:
    return budget.tokens / budget.time_us


@given(st.data())
def test_best_budget_is_the_exhaustive_optimum(data: st.DataObject) -> None:
    survival = data.draw(batches())
    times = data.draw(step_times(survival.size + 1))
    found = rate(best_budget(expected_tokens(survival, len(survival)), times))
    # Values below the floor are left out: they cannot be worth a part in a thousand.
    assert found >= exhaustive(survival, times) * (1.0 - 1e-3)


@given(st.data())
def test_early_stop_is_the_optimum_where_costs_are_convex(data: st.DataObject) -> None:
    survival = data.draw(batches())
    times = data.draw(step_times(survival.size + 1, convex=True))
    tokens = expected_tokens(survival, len(survival))
    found = rate(early_stop_budget(tokens, times, lower_envelope(times)))
    assert found >= exhaustive(survival, times) * (1.0 - 1e-3)


@given(st.data())
def test_a_synchronous_choice_depends_on_nothing_behind_the_next_draft(data: st.DataObject) -> None:
    """Whether the K-th draft is verified is settled by those before it, and by its own value."""
    survival = data.draw(batches())
    tokens = expected_tokens(survival, len(survival))
    times = data.draw(step_times(len(tokens)))
    foreseen = expected_tokens(data.draw(batches()), len(survival))
    foreseen = np.interp(np.linspace(0, 1, len(tokens)), np.linspace(0, 1, len(foreseen)), foreseen)
    place = data.draw(st.integers(1, survival.size))
    # From draft `place + 1` on everything is worth nothing.
    cut = np.where(np.arange(len(tokens)) > place, tokens[place], tokens)
    envelope = lower_envelope(times)
    for before, after in (
        [early_stop_budget(values, times, envelope).num_drafts for values in (tokens, cut)],
        [foreseen_stop_budget(values, times, foreseen).num_drafts for values in (tokens, cut)],
    ):
        # A draft of no worth is never admitted, so the count may end at `place`.
        assert (before >= place) == (after >= place) or tokens[place] == tokens[place - 1]


def test_staircase_is_not_left_at_its_first_step() -> None:
    costs = CostTables({1: 1.0}, {4: 100.0, 8: 101.0}, tiers=(4, 8))
    tokens = expected_tokens(np.full((2, 3), 0.9, dtype=np.float32).cumprod(1), 2)
    times = costs.verify_times(8)[2:]
    assert early_stop_budget(tokens, times, lower_envelope(times)).num_drafts == 6


def test_a_paid_tier_is_filled_but_not_with_drafts_below_the_floor() -> None:
    times = np.array([10.0, 20.0, 20.0, 20.0, 20.0])
    survival = np.array([[1.0, 0.4, 1e-9, 0.0]], dtype=np.float32)
    tokens = expected_tokens(survival, 1)
    assert early_stop_budget(tokens, times, lower_envelope(times)).num_drafts == 2
    assert best_budget(tokens, times).num_drafts in (0, 2)


TIERS = {
    "powers of two": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536),
    "every 8": (1, 2, 4, *range(8, 1537, 8)),
    "every 16": (1, 2, 4, 8, *range(16, 1537, 16)),
    "none": (),
}


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS.keys())
@pytest.mark.parametrize("num_requests", [4, 16, 60, 256])
def test_foreseen_stop_is_within_a_hundredth_of_the_optimum(
    tiers: tuple[int, ...], num_requests: int
) -> None:
    """On average over rounds; a single round may hold better drafts than anyone can foresee."""
    generator = np.random.default_rng(num_requests)
    scatter = generator.normal(1.0, 0.01, len(TIERS["every 8"]))
    points = {
        count: (12350.0 + 17.9 * count) * noise
        for count, noise in zip(tiers or TIERS["powers of two"], scatter, strict=False)
    }
    times = CostTables({1: 1.0}, points, tiers=tiers).verify_times(6 * num_requests)[num_requests:]
    losses = []
    foreseen: Times | None = None
    for _ in range(60):
        confidences = generator.beta(0.2595, 0.0405, (num_requests, 5)).astype(np.float32)
        tokens = expected_tokens(confidences.cumprod(1), num_requests)
        if foreseen is not None:
            found = foreseen_stop_budget(tokens, times, foreseen)
            losses.append(1.0 - rate(found) / rate(best_budget(tokens, times)))
        foreseen = tokens if foreseen is None else foreseen + (tokens - foreseen) / 16.0
    assert min(losses) >= 0.0
    assert float(np.mean(losses)) < 0.01


@given(st.data(), st.integers(2, 40))
def test_envelope_is_convex_and_touches_both_ends(data: st.DataObject, count: int) -> None:
    times = data.draw(step_times(count))
    envelope = lower_envelope(times)
    assert np.all(envelope <= times + 1e-9)
    assert np.all(np.diff(envelope, 2) >= -1e-9)
    assert (envelope[0], envelope[-1]) == (times[0], times[-1])
