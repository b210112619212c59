"""Old confidences by slot: a new owner starts with 1."""

from __future__ import annotations

import numpy as np

from deepinfer.speculation.stale_survival import StaleSurvival


def test_a_slot_that_was_given_on_knows_nothing_of_its_old_owner() -> None:
    stale = StaleSurvival(4, 2)
    first = np.array([[0.5, 0.25], [0.75, 0.5]], dtype=np.float32)
    stale.put([2, 0], [7, 9], first)
    assert stale.get([0, 1, 2], [9, 1, 7]).tolist() == [[0.75, 0.5], [1.0, 1.0], [0.5, 0.25]]
    assert stale.get([2], [8]).tolist() == [[1.0, 1.0]]
    first[:] = 0.0
    assert stale.get([0], [9]).tolist() == [[0.75, 0.5]]


def test_what_is_handed_out_may_be_changed() -> None:
    stale = StaleSurvival(2, 2)
    stale.get([0], [0])[:] = 0.0
    assert stale.get([0], [0]).tolist() == [[1.0, 1.0]]
