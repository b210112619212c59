"""Budgets in the engine: which survivals are looked at, whose they are, what is counted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from deepinfer.device.runtime import StepKind
from deepinfer.engine.draft_budgets import DraftBudgets
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata
from deepinfer.speculation.budget import Survival
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.planner import Scheduling, VerifyPlanner
from deepinfer.speculation.round_times import Round, RoundKind
from deepinfer.speculation.survival_history import SurvivalHistory

PARAMS = SamplingParams()
DRAFTS = 2
# A row costs as much as half a certain draft yields: certain drafts pay, unlikely ones do not.
COSTS = CostTables({1: 1.0}, {1: 100.0, 20: 1050.0})
CERTAIN, UNLIKELY = [1.0, 1.0], [0.01, 0.0001]


def sequences(count: int) -> list[Sequence]:
    result = []
    for number in range(count):
        controls = RequestControls.of(PARAMS, 9)
        request = Request(f"kind{number % 2}-{number}", None, [1], PARAMS, controls, 0, 0, number,
                          None)  # fmt: skip
        sequence = Sequence(request, 0, [1], cast(OutputText, None), max_len=99, slot=number)
        request.sequences = [sequence]
        result.append(sequence)
    return result


def step(
    number: int, members: list[Sequence], *, kind: StepKind = StepKind.DECODE
) -> SchedulerOutputs:
    """A step as the scheduler hands it out: counted among the samples in flight."""
    rows = []
    for member in members:
        member.num_inflight_samples += 1
        assert member.slot is not None
        query_len = 1 + DRAFTS if kind is StepKind.DECODE else 4
        rows.append(
            SequenceMetadata(member, member.generation, member.slot, 1, query_len, True, False)
        )
    return SchedulerOutputs(number, kind, tuple(rows))


def budgets(scheduling: Scheduling = Scheduling.ASYNCHRONOUS) -> DraftBudgets:
    planner = VerifyPlanner(
        COSTS, max_drafts=DRAFTS, max_num_seqs=4, scheduling=scheduling, falls_back=False,
        overhead_us=0.0,
    )  # fmt: skip
    return DraftBudgets(
        planner, max_num_seqs=4, max_drafts=DRAFTS, domain_of=lambda name: name.partition("-")[0]
    )


def collect(
    tested: DraftBudgets, scheduled: SchedulerOutputs, *survival: list[float], accepted: int = 0
) -> None:
    """Commit a step in which everything was verified."""
    count = len(scheduled.sequences)
    found: Survival = np.array(survival, dtype=np.float32)
    tested.committed(
        scheduled, np.full(count, DRAFTS), np.full(count, accepted, dtype=np.int64), found
    )
    for metadata in scheduled.sequences:
        metadata.sequence.num_inflight_samples -= 1


def test_with_a_step_in_flight_the_round_before_decides() -> None:
    tested, (a, b) = budgets(), sequences(2)
    prefill = step(0, [a, b], kind=StepKind.PREFILL)
    assert tested.choose(prefill) is None
    first = step(1, [a, b])
    assert tested.choose(first) is None  # nothing is known yet
    collect(tested, prefill, CERTAIN, UNLIKELY)
    assert tested.choose(step(2, [a, b])) == 2
    collect(tested, first, UNLIKELY, UNLIKELY)
    assert tested.choose(step(3, [a, b])) == 0


def test_drafts_at_hand_are_not_looked_at_when_nothing_is_in_flight() -> None:
    """After the pipeline was drained, the newest survivals are those of the drafts at hand."""
    tested, (a, b) = budgets(), sequences(2)
    collect(tested, step(0, [a, b], kind=StepKind.PREFILL), UNLIKELY, UNLIKELY)
    assert tested.choose(step(1, [a, b])) is None


def test_synchronous_plans_look_at_the_drafts_at_hand() -> None:
    tested, (a, b) = budgets(Scheduling.SYNCHRONOUS), sequences(2)
    collect(tested, step(0, [a, b], kind=StepKind.PREFILL), CERTAIN, UNLIKELY)
    assert tested.choose(step(1, [a, b])) == 2


def test_a_sequence_that_was_preempted_starts_anew() -> None:
    tested, (a, b) = budgets(), sequences(2)
    prefill, first = step(0, [a, b], kind=StepKind.PREFILL), step(1, [a, b])
    collect(tested, prefill, UNLIKELY, UNLIKELY)
    a.generation += 1
    collect(tested, first, UNLIKELY, UNLIKELY)  # a's part comes too late
    a.num_inflight_samples = 1
    b.num_inflight_samples = 1
    assert tested.choose(step(2, [a, b])) == 2
    assert tested.metrics.places.num_rounds == 1


def test_rows_that_a_sequence_cannot_use_are_not_planned() -> None:
    """Near its length limit a sequence has fewer drafts than survivals."""
    tested, (a, b) = budgets(), sequences(2)
    prefill = step(0, [a, b], kind=StepKind.PREFILL)
    step(1, [a, b])
    collect(tested, prefill, CERTAIN, UNLIKELY)
    later = step(2, [a, b])
    short = later.sequences[0]._replace(query_len=2)
    cut = SchedulerOutputs(2, StepKind.DECODE, (short, later.sequences[1]))
    assert tested.choose(cut) == 1


def test_rounds_are_counted_with_domain_confidence_and_plan() -> None:
    tested, (a, b) = budgets(), sequences(2)
    prefill, first = step(0, [a, b], kind=StepKind.PREFILL), step(1, [a, b])
    assert tested.choose(first) is None
    collect(tested, prefill, [0.5, 0.25], [0.5, 0.25])
    second = step(2, [a, b])
    second = replace(second, draft_budget=tested.choose(second))
    assert second.draft_budget is not None
    collect(tested, first, CERTAIN, CERTAIN, accepted=1)
    collect(tested, second, CERTAIN, CERTAIN, accepted=2)
    metrics = tested.metrics
    assert metrics.places.num_rounds == 4
    assert metrics.places.accepted.tolist() == [4, 2]
    assert {name: places.num_rounds for name, places in metrics.domains.items()} == {
        "kind0": 2, "kind1": 2,
    }  # fmt: skip
    # The first step verified drafts of confidence 0.5, the second those of confidence 1.
    bins = {round(confidence, 3): count for confidence, _, count in
            metrics.calibration.reliability()}  # fmt: skip
    assert bins == {0.5: 4, 1.0: 4}
    assert [span.num_planned for span in metrics.spans] == [0, 1]


def test_the_planner_hears_how_long_rounds_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=100.0)
    planner = VerifyPlanner(
        COSTS, max_drafts=DRAFTS, max_num_seqs=4, clock_us=lambda: next(clock)
    )  # fmt: skip
    heard: list[Round] = []
    monkeypatch.setattr(planner, "add_round", heard.append)
    tested, members = DraftBudgets(planner, max_num_seqs=4, max_drafts=DRAFTS), sequences(2)
    for number in range(5):
        scheduled = step(number, members)
        assert tested.choose(scheduled) is None
        assert tested.wait(lambda: "results") == "results"
        collect(tested, scheduled, CERTAIN, CERTAIN)
    # The clock is read at the begin and the end of a wait and at the commit.
    assert heard == [Round(2, 6, RoundKind.FIXED, 300.0, 200.0)] * 2


def test_a_round_is_told_as_what_the_planner_made_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a plan verifies all drafts, and the step looks like a fixed one."""
    tested, members = budgets(), sequences(2)
    assert tested._planner is not None
    heard: list[Round] = []
    monkeypatch.setattr(tested._planner, "wants_round", lambda num_sampling: True)
    monkeypatch.setattr(tested._planner, "add_round", heard.append)
    prefill = step(0, members, kind=StepKind.PREFILL)
    collect(tested, prefill, CERTAIN, CERTAIN)
    for number in range(1, 8):
        for member in members:
            member.num_inflight_samples = 0
        scheduled = step(number, members)
        assert tested.choose(scheduled) is None
        collect(tested, scheduled, CERTAIN, CERTAIN)
    assert heard
    assert {each.kind for each in heard} == {RoundKind.PLANNED}


def test_a_prompt_of_another_size_does_not_lose_the_round_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = VerifyPlanner(COSTS, max_drafts=DRAFTS, max_num_seqs=4)
    heard: list[Round] = []
    monkeypatch.setattr(planner, "add_round", heard.append)
    # Batches of one rest; the prompt is one of these.
    monkeypatch.setattr(planner, "wants_round", lambda num_sampling: num_sampling == 2)
    tested, members = DraftBudgets(planner, max_num_seqs=4, max_drafts=DRAFTS), sequences(3)
    for number in range(3):
        scheduled = step(number, members[:2])
        tested.choose(scheduled)
        collect(tested, scheduled, CERTAIN, CERTAIN)
    assert heard == []
    collect(tested, step(3, members[2:], kind=StepKind.PREFILL), CERTAIN)
    assert len(heard) == 1


def test_steps_that_are_taken_back_leave_nothing() -> None:
    tested, members = budgets(), sequences(2)
    for number in range(20):
        scheduled = step(number, members)
        tested.choose(scheduled)
        if number % 2:
            collect(tested, scheduled, CERTAIN, CERTAIN)
    assert tested._decisions == {}


@pytest.mark.parametrize("query_len", [1 + DRAFTS, DRAFTS])
def test_the_planner_hears_what_came_where_its_plan_was_foregone(
    monkeypatch: pytest.MonkeyPatch, query_len: int
) -> None:
    planner = VerifyPlanner(COSTS, max_drafts=DRAFTS, max_num_seqs=4)
    heard: list[tuple[int, list[list[float]], list[int]]] = []

    def add_outcome(num_drafts: int, survival: Survival, accepted: np.ndarray) -> None:
        heard.append((num_drafts, survival.tolist(), accepted.tolist()))

    monkeypatch.setattr(planner, "add_outcome", add_outcome)
    tested, members = DraftBudgets(planner, max_num_seqs=4, max_drafts=DRAFTS), sequences(2)
    collect(tested, step(0, members, kind=StepKind.PREFILL), CERTAIN, [0.5, 0.0])
    inflight = step(1, members)
    tested.choose(inflight)
    for number in range(2, 24):
        newer = step(number, members)
        rows = [metadata._replace(query_len=query_len) for metadata in newer.sequences]
        newer = replace(newer, sequences=tuple(rows))
        tested.choose(newer)
        collect(tested, inflight, CERTAIN, [0.5, 0.0], accepted=1)
        inflight = newer
    # Steps 21 and 22 were planned and are committed; told only if every draft was verified.
    is_whole = query_len == 1 + DRAFTS
    assert heard == [(2, [CERTAIN, [0.5, 0.0]], [1, 1])] * 2 * is_whole


def test_a_resting_planner_is_shown_no_survivals(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = VerifyPlanner(COSTS, max_drafts=DRAFTS, max_num_seqs=4)
    tested, members = DraftBudgets(planner, max_num_seqs=4, max_drafts=DRAFTS), sequences(2)
    monkeypatch.setattr(SurvivalHistory, "lawful", lambda *_: pytest.fail("survivals were read"))
    for number in range(20):
        assert tested.choose(step(number, members)) is None
    assert planner.num_plans == 0
    assert planner.wants_survival(2)


def test_without_a_planner_everything_is_verified_and_counted() -> None:
    tested = DraftBudgets(None, max_num_seqs=4, max_drafts=DRAFTS)
    members = sequences(2)
    scheduled = step(0, members)
    assert tested.choose(scheduled) is None
    collect(tested, scheduled, CERTAIN, CERTAIN, accepted=1)
    assert tested.metrics.places.conditional == [1.0, pytest.approx(0.0)]
    assert tested.metrics.calibration.error() is None  # nobody knew these drafts' confidences
