"""Confidences of earlier steps on the host, by slot; a slot's new owner never gets the old ones.

The device copies survivals to pinned memory at the end of a step; the host puts them here when it
collects the step. In front of a launch, the newest entry is what the planner may use: with one
step in flight it is two steps old.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepinfer.speculation.budget import Survival


class StaleSurvival:
    """The newest collected survivals of every slot."""

    def __init__(self, max_num_seqs: int, max_drafts: int) -> None:
        """Nothing known of any slot.

        Args:
            max_num_seqs: slots.
            max_drafts: D drafts of a request.
        """
        self._survival = np.ones((max_num_seqs, max_drafts), dtype=np.float32)
        self._generations: npt.NDArray[np.int64] = np.full(max_num_seqs, -1, dtype=np.int64)

    def put(self, slots: Sequence[int], generations: Sequence[int], survival: Survival) -> None:
        """Keep the survivals of a collected step.

        Args:
            slots: slot of each request.
            generations: number that the slot's owner had in that step; a sequence that loses
                its slot, or its place in it, gets another one.
            survival: [N, D] fp32; copied.
        """
        self._survival[slots] = survival
        self._generations[slots] = generations

    def get(self, slots: Sequence[int], generations: Sequence[int]) -> Survival:
        """[N, D] fp32 survivals of requests; 1 where an owner's own are not known yet."""
        known = self._generations[slots] == np.asarray(generations, dtype=np.int64)
        rows = self._survival[slots]
        rows[~known] = 1.0
        return rows
