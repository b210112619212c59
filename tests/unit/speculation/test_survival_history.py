"""Old survivals by slot: whose they are, and which of them a plan may look at."""

from __future__ import annotations

import numpy as np

from deepinfer.speculation.budget import Survival
from deepinfer.speculation.survival_history import SurvivalHistory


def rows(*values: float) -> Survival:
    return np.array([[value, value / 2] for value in values], dtype=np.float32).reshape(-1, 2)


def test_a_slot_that_was_given_on_knows_nothing_of_its_old_owner() -> None:
    history = SurvivalHistory(4, 2)
    history.put([2, 0], ["c", "a"], rows(0.5, 0.75))
    assert history.newest([0, 1, 2], ["a", "b", "c"]).tolist() == [
        [0.75, 0.375], [1.0, 1.0], [0.5, 0.25],
    ]  # fmt: skip
    assert history.newest([2], ["d"]).tolist() == [[1.0, 1.0]]
    history.put([2], ["d"], rows(0.25))
    assert history.newest([2], ["d"]).tolist() == [[0.25, 0.125]]
    assert history.lawful([2], ["d"], [False]).tolist() == [[1.0, 1.0]]
    assert history.newest([2], ["c"]).tolist() == [[1.0, 1.0]]


def test_drafts_at_hand_are_not_looked_at() -> None:
    history = SurvivalHistory(2, 2)
    history.put([0, 1], ["a", "b"], rows(0.5, 0.5))
    assert history.lawful([0, 1], ["a", "b"], [True, False]).tolist() == [[0.5, 0.25], [1.0, 1.0]]
    history.put([0, 1], ["a", "b"], rows(0.125, 0.125))
    assert history.lawful([0, 1], ["a", "b"], [True, False]).tolist() == [
        [0.125, 0.0625], [0.5, 0.25],
    ]  # fmt: skip


def test_what_was_put_and_what_is_handed_out_may_be_changed() -> None:
    history = SurvivalHistory(1, 2)
    given = rows(0.5)
    history.put([0], ["a"], given)
    given[:] = 0.0
    history.newest([0], ["a"])[:] = 0.0
    assert history.newest([0], ["a"]).tolist() == [[0.5, 0.25]]


def test_a_step_without_samples_changes_nothing() -> None:
    history = SurvivalHistory(2, 2)
    history.put([1], ["a"], rows(0.5))
    history.put([], [], rows())
    assert history.newest([], []).shape == (0, 2)
    assert history.newest([1], ["a"]).tolist() == [[0.5, 0.25]]
