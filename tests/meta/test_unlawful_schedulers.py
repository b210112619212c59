"""Choosing what to verify must not change what comes out: unlawful choices are caught, ours pass.

The toy: every token of the target is 0 with probability 0.7, the drafter draws 0 with 0.5, so
that a draft is accepted with 0.8. A place's confidence depends on the draft before it, as the real
head's does; it need not be right, only lawful use of it keeps the output's distribution. Tokens
that decoding emits are counted; chi-square has one degree of freedom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from deepinfer.speculation.budget import Survival, best_budget, expected_tokens
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.planner import Scheduling, VerifyPlanner
from deepinfer_reference.ops.spec import admit_drafts as admit

TARGET, DRAFT = np.array([0.7, 0.3]), np.array([0.5, 0.5])
NUM_ROUNDS = 2000
CAUGHT, PASSED = 50.0, 12.0
"""Chi-square is above 12 by chance once in 1,900 tests, above 50 never; the draws are fixed."""
Choice = Callable[[Survival, list[Survival]], int]
"""Drafts to verify, from survivals [R, D] of this round and those of all rounds before it."""


class Toy(NamedTuple):
    """A drafter and what its rows cost.

    Attributes:
        num_drafts: D.
        sure: confidence of the place `judge`, when the draft before it is 0.
        judge: that place; all others say 0.8.
        costs: times of a step.
    """

    num_drafts: int
    judge: int
    sure: float
    costs: CostTables

    def survival(self, drafts: npt.NDArray[np.int64]) -> Survival:
        confidences = np.full(drafts.shape, 0.8, dtype=np.float32)
        confidences[:, self.judge] = np.where(drafts[:, self.judge - 1] == 0, self.sure, 0.0)
        return confidences.cumprod(axis=1)


# The counter-example of the losslessness argument: steps a second of 1, 0.5 and 0.45.
PAIR = Toy(2, 1, 0.9, CostTables({1: 1e-3}, {1: 1.0, 2: 2.0, 3: 1 / 0.45}))
# Four drafts pay only if the last one is likely; the rounds to come draft at its place again.
QUARTET = Toy(4, 3, 0.9, CostTables({1: 1e-3}, {1: 1.0, 2: 3.1, 4: 3.15, 5: 3.2}))


def planned(
    toy: Toy, num_requests: int, scheduling: Scheduling, age: int, *, falls_back: bool = True
) -> Choice:
    """Our planner, given the survivals of `age` rounds before."""
    planner = VerifyPlanner(
        toy.costs,
        max_drafts=toy.num_drafts,
        max_num_seqs=num_requests,
        scheduling=scheduling,
        falls_back=falls_back,
        overhead_us=0.0,
        # A plan takes longer than the toy's steps, which would make it not pay.
        clock_us=lambda: 0.0,
    )

    def choose(now: Survival, before: list[Survival]) -> int:
        known = [*before, now][-1 - age] if len(before) >= age else None
        return planner.plan(num_requests, known).num_drafts

    return choose


def retrospective(toy: Toy, num_requests: int) -> Choice:
    """The best K of the round at hand, which looks at what it decides about."""
    times = toy.costs.verify_times(num_requests * (1 + toy.num_drafts))[num_requests:]
    return lambda now, before: best_budget(expected_tokens(now, num_requests), times).num_drafts


class Round(NamedTuple):
    """What was verified, and the tokens that each request emitted."""

    budget: int
    tokens: list[list[int]]


def decode(
    toy: Toy, choose: Choice, num_requests: int, num_rounds: int, *, by_position: bool = False
) -> list[Round]:
    """Rounds of decoding.

    Args:
        by_position: a draft's random number is that of its position, in every round again;
            else each round has its own.
    """
    generator = np.random.default_rng(7)
    longest = num_rounds * (1 + toy.num_drafts) + toy.num_drafts
    fixed = generator.random((num_requests, longest + 1))
    anchors = np.zeros(num_requests, dtype=np.int64)
    before: list[Survival] = []
    rounds = []
    for _ in range(num_rounds):
        uniforms = generator.random((num_requests, toy.num_drafts))
        if by_position:
            places = anchors[:, None] + np.arange(1, toy.num_drafts + 1)
            uniforms = np.take_along_axis(fixed, places, axis=1)
        drafts = (uniforms >= DRAFT[0]).astype(np.int64)
        survival = toy.survival(drafts)
        budget = choose(survival, before)
        before = [*before[-2:], survival]
        available = torch.full((num_requests,), toy.num_drafts)
        lengths = admit(torch.from_numpy(survival), available, torch.tensor([budget]))
        tokens = [
            list(_verified(row[:length], generator))
            for row, length in zip(drafts, lengths.tolist(), strict=True)
        ]
        anchors += [len(row) for row in tokens]
        rounds.append(Round(budget, tokens))
    return rounds


def _verified(drafts: npt.NDArray[np.int64], generator: np.random.Generator) -> Iterator[int]:
    """Accepted drafts and the token after them, by rejection sampling."""
    for token in drafts.tolist():
        if generator.random() * DRAFT[token] >= TARGET[token]:
            residual = np.maximum(TARGET - DRAFT, 0.0)
            yield int(generator.random() >= residual[0] / residual.sum())
            return
        yield token
    yield int(generator.random() >= TARGET[0])


def chi_square(tokens: list[int]) -> float:
    counts = np.bincount(tokens, minlength=2)
    expected = TARGET * len(tokens)
    return float((((counts - expected) ** 2) / expected).sum())


def emitted(rounds: list[Round]) -> list[int]:
    return [token for each in rounds for row in each.tokens for token in row]


def after_short_rounds(rounds: list[Round], age: int = 2) -> list[int]:
    """First tokens of rounds behind `age` that emitted one token: the oldest has drafted here."""
    return [
        rounds[index].tokens[0][0]
        for index in range(age, len(rounds))
        if all(len(each.tokens[0]) == 1 for each in rounds[index - age : index])
    ]


def test_retrospective_choice_is_caught_with_the_distribution_foretold() -> None:
    rounds = decode(PAIR, retrospective(PAIR, 1), 1, NUM_ROUNDS)
    assert chi_square(emitted(rounds)) > CAUGHT
    zeros = np.mean([each.tokens[0][0] == 0 for each in rounds])
    assert abs(zeros - 0.85) < 0.02


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("toy", [PAIR, QUARTET], ids=["pair", "quartet"])
@pytest.mark.parametrize(
    ("scheduling", "age"),
    [(Scheduling.SYNCHRONOUS, 0), (Scheduling.ASYNCHRONOUS, 1), (Scheduling.ASYNCHRONOUS, 2)],
)
def test_our_choices_keep_the_distribution(
    toy: Toy, num_requests: int, scheduling: Scheduling, age: int
) -> None:
    # Of quartets the planner would verify all drafts: plans from old confidences gain too little.
    falls_back = toy is PAIR and num_requests > 1
    choose = planned(toy, num_requests, scheduling, age, falls_back=falls_back)
    rounds = decode(toy, choose, num_requests, NUM_ROUNDS // num_requests)
    # Or all of this would hold because nothing was chosen.
    assert len({each.budget for each in rounds}) > 1
    assert chi_square(emitted(rounds)) < PASSED
    assert chi_square(after_short_rounds(rounds)) < PASSED


def test_asynchronous_choice_on_the_round_at_hand_is_caught() -> None:
    choose = planned(PAIR, 1, Scheduling.ASYNCHRONOUS, 0, falls_back=False)
    assert chi_square(emitted(decode(PAIR, choose, 1, NUM_ROUNDS))) > CAUGHT


def test_old_confidences_know_drafts_drawn_again_from_the_same_number() -> None:
    """Two rounds later the same position is drafted anew; the same random number draws the same
    token, and the old confidence has seen it."""
    choose = planned(QUARTET, 1, Scheduling.ASYNCHRONOUS, 2, falls_back=False)
    rounds = decode(QUARTET, choose, 1, 2 * NUM_ROUNDS, by_position=True)
    assert chi_square(after_short_rounds(rounds)) > CAUGHT
