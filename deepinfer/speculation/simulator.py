"""Rounds of speculative decoding without a model: what a planner gains where costs are known.

Confidences are drawn independently from one Beta distribution and are right on average: a draft
is accepted with exactly its confidence. A step takes a time that is linear in its rows. All
policies see the same confidences and the same luck, so that their difference has little noise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from deepinfer.speculation.budget import Survival, admitted
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.planner import PlanMode, Scheduling, VerifyPlanner
from deepinfer.speculation.round_times import Round

_STEPS_OF_AGE = 2
"""Steps between a confidence and the first plan that may use it, with one step in flight."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Drafts and costs; the defaults are fitted to the published decode of 60 sequences a rank.

    Attributes:
        num_drafts: D.
        mean: of a confidence.
        concentration: a + b of its Beta distribution; small: sure of most, sure against some.
        base_us: time of a step without rows.
        row_us: time of a row.
        overhead_us: time that a planned step takes beside a fixed one.
        relative_noise: of the measured costs; a gain below it counts as none.
        host_us: what the host needs for a step: at the same time, by turns if synchronous.
    """

    num_drafts: int = 5
    mean: float = 0.865
    concentration: float = 0.3
    base_us: float = 12_350.0
    row_us: float = 17.9
    overhead_us: float = 200.0
    relative_noise: float = 0.01
    host_us: float = 0.0

    def costs(self, max_rows: int) -> CostTables:
        """Exact tables of these costs."""
        return CostTables(
            {1: self.base_us},
            {1: self.row_us, max_rows: self.row_us * max_rows},
            relative_noise=self.relative_noise,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave; the figures are per sequence and step, except the rate.

    Attributes:
        num_verified: verified drafts.
        num_accepted: accepted drafts.
        tokens_per_s: of all sequences together.
        planned_share: steps in which the planner chose, not the fixed length.
    """

    num_verified: float
    num_accepted: float
    tokens_per_s: float
    planned_share: float


def simulate(
    scenario: Scenario,
    num_requests: int,
    num_steps: int,
    *,
    scheduling: Scheduling | None,
    falls_back: bool = True,
    seed: int = 0,
) -> Outcome:
    """Run rounds of one batch.

    Args:
        scenario: drafts and costs.
        num_requests: sequences, all sampling.
        num_steps: rounds.
        scheduling: of the planner; None verifies all drafts.
        falls_back: whether the planner may rest where it gains less than the noise.
        seed: of confidences and luck.
    """
    generator = np.random.default_rng(seed)
    size = scenario.num_drafts
    alpha = scenario.mean * scenario.concentration
    beta = scenario.concentration - alpha
    planner = VerifyPlanner(
        scenario.costs(num_requests * (1 + size)),
        max_drafts=size,
        max_num_seqs=num_requests,
        scheduling=scheduling or Scheduling.ASYNCHRONOUS,
        falls_back=falls_back,
        overhead_us=scenario.overhead_us,
    )
    age = _STEPS_OF_AGE if scheduling is Scheduling.ASYNCHRONOUS else 0
    known: deque[Survival] = deque(maxlen=age + 1)
    verified = accepted = planned = 0
    time_us = 0.0
    for _ in range(num_steps):
        confidences = generator.beta(alpha, beta, (num_requests, size)).astype(np.float32)
        luck = generator.random((num_requests, size), dtype=np.float32)
        survival = confidences.cumprod(axis=1, dtype=np.float32)
        known.append(survival)
        lengths, round_us, is_planned = np.full(num_requests, size), 0.0, False
        if scheduling is not None:
            num_plans = planner.num_plans
            budget = planner.plan(num_requests, known[0] if len(known) > age else None)
            if planner.num_plans > num_plans:
                round_us += scenario.overhead_us
            is_planned = budget.mode is PlanMode.DYNAMIC
            if is_planned:
                planned += 1
                lengths = admitted(survival, budget.num_drafts)
        right = (luck < confidences).cumprod(axis=1).sum(axis=1)
        verified += int(lengths.sum())
        accepted += int(np.minimum(right, lengths).sum())
        rows = num_requests + int(lengths.sum())
        round_us += scenario.base_us + scenario.row_us * rows
        if scheduling is Scheduling.SYNCHRONOUS:
            round_us += scenario.host_us
        else:
            round_us = max(round_us, scenario.host_us)
        time_us += round_us
        if scheduling is not None:
            if planner.foregone is not None:
                planner.add_outcome(planner.foregone, survival, right)
            planner.add_round(Round(num_requests, rows, planner.kind, round_us, scenario.host_us))
    rounds = num_requests * num_steps
    return Outcome(
        num_verified=verified / rounds,
        num_accepted=accepted / rounds,
        tokens_per_s=(rounds + accepted) / time_us * 1e6,
        planned_share=planned / num_steps,
    )
