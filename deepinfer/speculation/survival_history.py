"""Survivals on the host, by slot: the newest collected ones, and those of the round before.

A plan made while steps are in flight must not look at the drafts that it decides about. As a rule
the device has drafted anew since the newest collected round, but a sequence that has nothing in
flight, because it sat a step out or because the pipeline was drained, still has the drafts
of that round at hand; then the round before is the one to look at.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from deepinfer.speculation.budget import Survival


class SurvivalHistory:
    """Two rounds of every slot; a slot's new owner never gets those of the old one."""

    def __init__(self, max_num_seqs: int, max_drafts: int) -> None:
        """Nothing known of any slot.

        Args:
            max_num_seqs: slots.
            max_drafts: D drafts of a request.
        """
        # Nothing known: as if certain, so that all drafts are verified.
        self._newest = np.ones((max_num_seqs, max_drafts), dtype=np.float32)
        self._before = np.ones_like(self._newest)
        self._owners: list[Hashable] = [None] * max_num_seqs

    def put(self, slots: Sequence[int], owners: Sequence[Hashable], survival: Survival) -> None:
        """Keep the survivals of a collected step, newest last.

        Args:
            slots: slot of each request, each once.
            owners: what tells this owner of the slot from all others, and a sequence from itself
                before a preemption; not None.
            survival: [N, D] fp32; copied.
        """
        self._before[slots] = np.where(self._is_owner(slots, owners), self._newest[slots], 1.0)
        self._newest[slots] = survival
        for slot, owner in zip(slots, owners, strict=True):
            self._owners[slot] = owner

    def newest(
        self, slots: Sequence[int], owners: Sequence[Hashable], *, unknown: float = 1.0
    ) -> Survival:
        """[N, D] fp32 of the newest round; `unknown` where an owner's own are not known."""
        rounds = self._newest[slots]
        return np.where(self._is_owner(slots, owners), rounds, np.float32(unknown))

    def lawful(
        self, slots: Sequence[int], owners: Sequence[Hashable], drafted_anew: Sequence[bool]
    ) -> Survival:
        """[N, D] fp32 of the newest round whose drafts are not those at hand.

        Args:
            slots: slot of each request.
            owners: as they were put.
            drafted_anew: whether a step in flight drafts for the request.
        """
        anew = np.asarray(drafted_anew, dtype=bool)[:, None]
        rounds = np.where(anew, self._newest[slots], self._before[slots])
        return np.where(self._is_owner(slots, owners), rounds, np.float32(1.0))

    def _is_owner(self, slots: Sequence[int], owners: Sequence[Hashable]) -> npt.NDArray[np.bool_]:
        known = [self._owners[slot] == owner for slot, owner in zip(slots, owners, strict=True)]
        return np.array(known, dtype=bool)[:, None]
