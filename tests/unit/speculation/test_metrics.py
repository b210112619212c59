"""Counts of a run, against the same counted by hand."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.cli.speculation_svg import draw_metrics
from deepinfer.speculation.metrics import SpeculationMetrics

ROUNDS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from("ab")),
    min_size=1,
    max_size=8,
)


def test_a_round_counts_at_each_place_it_came_to() -> None:
    metrics = SpeculationMetrics(3)
    metrics.add_step([3, 3, 3], [3, 2, 0], [1, 2, 0])
    places = metrics.places
    assert places.drafted.tolist() == [3, 3, 3]
    assert places.verified.tolist() == [2, 2, 1]
    # The third draft of the first request was verified, but the second had been refused.
    assert places.reached.tolist() == [2, 2, 0]
    assert places.accepted.tolist() == [2, 1, 0]
    assert places.conditional == [1.0, 0.5, None]
    assert metrics.figures()["all"]["per_round"] == {  # type: ignore[index]
        "drafted": 3.0, "verified": 5 / 3, "accepted": 1.0,
    }  # fmt: skip


@given(st.lists(ROUNDS, max_size=4))
def test_domains_add_up_to_the_whole(steps: list[list[tuple[int, int, int, str]]]) -> None:
    metrics = SpeculationMetrics(3)
    for rounds in steps:
        drafted = [max(values[:3]) for values in rounds]
        verified = [sorted(values[:3])[1] for values in rounds]
        accepted = [min(values[:3]) for values in rounds]
        metrics.add_step(drafted, verified, accepted, domains=[values[3] for values in rounds])
    for name in ("drafted", "verified", "reached", "accepted"):
        whole = getattr(metrics.places, name)
        parts = sum((getattr(part, name) for part in metrics.domains.values()), np.zeros(3))
        assert whole.tolist() == parts.tolist()
    assert metrics.places.num_rounds == sum(d.num_rounds for d in metrics.domains.values())


def test_a_confidence_is_judged_given_that_those_before_it_held() -> None:
    metrics = SpeculationMetrics(2)
    survival = np.array([[0.5, 0.25], [0.5, 0.25], [0.5, 0.45]], dtype=np.float32)
    metrics.add_step([2, 2, 2], [2, 2, 1], [0, 1, 1], survival=survival)
    calibration = metrics.calibration
    # First place: 0.5 foretold three times, two came true. Second: judged once, 0.5, refused.
    assert calibration.count.sum(axis=1).tolist() == [3, 1]
    assert calibration.error(0) == pytest.approx(abs(1.5 - 2.0) / 3)
    assert calibration.error(1) == pytest.approx(0.5)
    assert calibration.error() == pytest.approx(abs(2.0 - 2.0) / 4)
    ((confidence, accepted, count),) = calibration.reliability()
    assert (confidence, accepted, count) == pytest.approx((0.5, 0.5, 4))


def test_right_confidences_have_no_calibration_error() -> None:
    generator = np.random.default_rng(3)
    metrics = SpeculationMetrics(4)
    for _ in range(200):
        confidences = generator.random((50, 4), dtype=np.float32)
        accepted = (generator.random((50, 4)) < confidences).cumprod(axis=1).sum(axis=1)
        survival = confidences.cumprod(axis=1)
        verified = generator.integers(0, 5, 50)
        metrics.add_step([4] * 50, verified.tolist(), np.minimum(accepted, verified).tolist(),
                         survival=survival)  # fmt: skip
    error = metrics.calibration.error()
    assert error is not None
    assert error < 0.02


def test_long_runs_keep_all_steps_in_few_spans() -> None:
    metrics = SpeculationMetrics(2)
    for step in range(3000):
        metrics.add_step([2], [step % 3], [0], is_planned=step % 2 == 0)
    assert len(metrics.spans) <= 512
    assert sum(span.num_steps for span in metrics.spans) == 3000
    assert sum(span.num_verified for span in metrics.spans) == 3000
    assert sum(span.num_planned for span in metrics.spans) == 1500
    assert {span.num_steps for span in metrics.spans[:-1]} == {8}


def test_figures_do_not_depend_on_when_they_are_asked_for() -> None:
    generator = np.random.default_rng(5)
    asked, unasked = SpeculationMetrics(3), SpeculationMetrics(3)
    for step in range(150):
        count = int(generator.integers(0, 6))
        verified = generator.integers(0, 4, count)
        accepted = np.minimum(generator.integers(0, 4, count), verified)
        survival = generator.random((count, 3), dtype=np.float32).cumprod(axis=1)
        names = [("prose", "code", None)[number] for number in generator.integers(0, 3, count)]
        for metrics in (asked, unasked):
            metrics.add_step(
                [3] * count, verified, accepted, survival=None if step % 7 == 0 else survival,
                domains=None if step % 5 == 0 else names, is_planned=step % 2 == 0,
            )  # fmt: skip
        assert asked.places.num_rounds > 0 or count == 0
        verified[:] = 0  # it was copied
    assert asked.figures() == unasked.figures()


def test_pictures_are_drawn_of_much_and_of_nothing() -> None:
    empty, full = SpeculationMetrics(3), SpeculationMetrics(3)
    survival = np.full((2, 3), 0.5, dtype=np.float32)
    full.add_step([3, 3], [3, 1], [2, 0], survival=survival, domains=["prose", "code"])
    for metrics in (empty, full):
        ElementTree.fromstring(draw_metrics(metrics, caption="test"))
    svg = draw_metrics(full, caption="test")
    assert "prose" in svg
    assert "calibration error" in svg
