"""A planner that chooses any budget at all: the output may not depend on it."""

from __future__ import annotations

import random

from deepinfer.speculation.budget import Survival
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.planner import PlanMode, PlannedBudget, VerifyPlanner


class AnyBudget(VerifyPlanner):
    """Budgets drawn at random, from none to all drafts."""

    def __init__(self, seed: int, *, max_drafts: int, max_num_seqs: int) -> None:
        costs = CostTables({1: 1.0}, {1: 1.0})
        super().__init__(costs, max_drafts=max_drafts, max_num_seqs=max_num_seqs)
        self._random = random.Random(seed)

    def plan(
        self, num_sampling: int, survival: Survival | None, num_other_rows: int = 0
    ) -> PlannedBudget:
        most = num_sampling * self._max_drafts
        return PlannedBudget(self._random.randint(0, most), PlanMode.DYNAMIC)
