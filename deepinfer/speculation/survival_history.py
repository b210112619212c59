"""Survivals on the host, by slot: the newest collected ones, and those of the round before.

A plan made while steps are in flight must not look at the drafts that it decides about. As a rule
the device has drafted anew since the newest collected round, but a sequence that has nothing in
flight, because it sat a step out or because the pipeline was drained, still has the drafts
of that round at hand; then the round before is the one to look at.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from deepinfer.speculation.budget import Survival

Slots = Sequence[int]


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

    def put(self, slots: Slots, owners: list[Hashable], survival: Survival) -> None:
        """Keep the survivals of a collected step, newest last.

        Args:
            slots: slot of each request, each once.
            owners: what tells this owner of the slot from all others, and a sequence from itself
                before a preemption; not None.
            survival: [N, D] fp32; copied.
        """
        rows = np.array(slots, dtype=np.intp)  # a list would be converted at every use
        self._before[rows] = self.newest(slots, owners)
        self._newest[rows] = survival
        if not self._are_owners(slots, owners):
            for slot, owner in zip(slots, owners, strict=True):
                self._owners[slot] = owner

    def newest(self, slots: Slots, owners: list[Hashable], *, unknown: float = 1.0) -> Survival:
        """[N, D] fp32 of the newest round; `unknown` where an owner's own are not known."""
        rounds = self._newest.take(slots, axis=0)
        return self._of_owners(rounds, slots, owners, unknown)

    def lawful(
        self, slots: Slots, owners: list[Hashable], drafted_anew: Sequence[bool]
    ) -> Survival:
        """[N, D] fp32 of the newest round whose drafts are not those at hand.

        Args:
            slots: slot of each request.
            owners: as they were put.
            drafted_anew: whether a step in flight drafts for the request.
        """
        rounds = self._newest.take(slots, axis=0)
        if not all(drafted_anew):  # nearly always all of them are
            anew = np.asarray(drafted_anew, dtype=bool)[:, None]
            rounds = np.where(anew, rounds, self._before.take(slots, axis=0))
        return self._of_owners(rounds, slots, owners, 1.0)

    def _of_owners(
        self, rounds: Survival, slots: Slots, owners: list[Hashable], unknown: float
    ) -> Survival:
        """`rounds`, changed to `unknown` where they are not the owner's."""
        if not self._are_owners(slots, owners):
            is_owner = [
                self._owners[slot] == owner for slot, owner in zip(slots, owners, strict=True)
            ]
            rounds[~np.array(is_owner, dtype=bool)] = unknown
        return rounds

    def _are_owners(self, slots: Slots, owners: list[Hashable]) -> bool:
        """Whether every slot still has that owner, as nearly always."""
        return [self._owners[slot] for slot in slots] == owners
