"""Admission of drafts on the device, in the simulator, and what both promise."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.device.ops.spec import SURVIVAL_FLOOR
from deepinfer.speculation.budget import admitted
from deepinfer_reference.ops.spec import admit_drafts

CONFIDENCES = st.one_of(st.floats(0.0, 1.0, width=32), st.sampled_from([0.0, 0.25, 0.5, 1.0]))


@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.integers(0, 40))
def test_admitted_drafts_are_the_likeliest_and_first_of_their_requests(
    data: st.DataObject, num_requests: int, num_drafts: int, budget: int
) -> None:
    count = num_requests * num_drafts
    values = data.draw(st.lists(CONFIDENCES, min_size=count, max_size=count))
    confidences = np.array(values, dtype=np.float32).reshape(num_requests, num_drafts)
    survival = confidences.cumprod(axis=1, dtype=np.float32)
    limits = data.draw(
        st.lists(st.integers(0, num_drafts), min_size=num_requests, max_size=num_requests)
    )
    available = np.arange(num_drafts) < np.array(limits)[:, None]
    lengths = admit_drafts(
        torch.from_numpy(survival), torch.tensor(limits), torch.tensor([budget])
    ).numpy()
    # The simulator has no limits: a draft that is not there is one that nobody believes in.
    assert lengths.tolist() == admitted(np.where(available, survival, 0.0), budget).tolist()
    likely = available & (survival >= SURVIVAL_FLOOR)
    assert lengths.sum() == min(budget, likely.sum())
    chosen = np.arange(num_drafts) < lengths[:, None]
    assert not (chosen & ~likely).any()
    left = likely & ~chosen
    if chosen.any() and left.any():
        assert survival[chosen].min() >= survival[left].max()
