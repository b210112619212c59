"""The planner: where it plans, where it does not, and what it refuses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.device.errors import ConfigError, ContractError
from deepinfer.speculation.budget import Survival
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.foregone_plans import Outcome
from deepinfer.speculation.plan_record import PlanRecord
from deepinfer.speculation.planner import PlanMode, PlannedBudget, Scheduling, VerifyPlanner
from deepinfer.speculation.round_times import Round, RoundKind
from deepinfer.speculation.round_turns import RoundTurns

DRAFTS = 3
STEEP = CostTables({1: 10.0}, {1: 110.0, 100: 1100.0})
FLAT = CostTables({1: 10.0}, {1: 1000.0, 100: 1000.1})


def planner(costs: CostTables = STEEP, **options: object) -> VerifyPlanner:
    settings = {"max_drafts": DRAFTS, "max_num_seqs": 16, "overhead_us": 0.0} | options
    return VerifyPlanner(costs, **settings)  # type: ignore[arg-type]


def survival(*rows: tuple[float, ...]) -> Survival:
    return np.array(rows, dtype=np.float32)


@dataclass
class Watch:
    """Tells rounds as the engine does: the third of a kind in a row is the first, one step late."""

    kinds: list[RoundKind] = field(default_factory=list)
    held: Round | None = None

    def ended(self, tested: VerifyPlanner, current: Round) -> None:
        if self.held is not None:
            tested.add_round(self.held)
        self.kinds = [*self.kinds[-2:], current.kind]
        self.held = current if len(self.kinds) == 3 and len(set(self.kinds)) == 1 else None


WATCHES: WeakKeyDictionary[VerifyPlanner, Watch] = WeakKeyDictionary()


def rounds(
    tested: VerifyPlanner,
    drafts: Survival,
    count: int,
    *,
    host_us: float = 0.0,
    fixed_us: float = 0.0,
    planned_us: float = 0.0,
) -> list[PlanMode]:
    """Plan and time steps one after the other; a round lasts as long as host or device."""
    watch, modes = WATCHES.setdefault(tested, Watch()), []
    for _ in range(count):
        budget = tested.plan(len(drafts), drafts)
        modes.append(budget.mode)
        is_cut = budget.mode is PlanMode.DYNAMIC
        time_us = max(host_us, planned_us if is_cut else fixed_us)
        num_rows = len(drafts) + budget.num_drafts
        watch.ended(tested, Round(len(drafts), num_rows, tested.kind, time_us, host_us))
    return modes


def turns(modes: list[PlanMode]) -> list[tuple[PlanMode, int]]:
    return [(mode, len(list(group))) for mode, group in itertools.groupby(modes)]


GOOD_AND_BAD = survival((1.0, 0.99, 0.98), (0.05, 0.01, 0.0))


@pytest.mark.parametrize("scheduling", Scheduling)
def test_drafts_that_do_not_pay_for_their_rows_are_left_out(scheduling: Scheduling) -> None:
    tested = planner(scheduling=scheduling, falls_back=False)
    assert tested.plan(2, GOOD_AND_BAD) == (3, PlanMode.DYNAMIC)


def test_unknown_requests_are_verified_whole() -> None:
    ones = np.ones((2, DRAFTS), dtype=np.float32)
    assert planner().plan(2, None) == PlannedBudget(6, PlanMode.FIXED)
    assert planner().plan(2, ones) == PlannedBudget(6, PlanMode.FIXED)


def test_no_request_that_samples_has_no_drafts() -> None:
    empty = np.ones((0, DRAFTS), dtype=np.float32)
    assert planner().plan(0, empty, num_other_rows=7).num_drafts == 0


def test_rows_of_others_cost_and_yield_nothing() -> None:
    """A step that is long anyway verifies what a short one would not."""
    steep = CostTables({1: 1.0}, {1: 10.0, 1000: 9001.0})
    drafts = survival((0.5, 0.2, 0.1))
    tested = planner(steep, falls_back=False)
    alone = tested.plan(1, drafts).num_drafts
    beside = tested.plan(1, drafts, num_other_rows=500).num_drafts
    assert (alone, beside) == (0, 3)


@pytest.mark.parametrize("known", [True, False])
def test_rows_of_the_samplers_buffers_are_a_limit(known: bool) -> None:
    limited = planner(FLAT, max_rows=16)
    drafts = np.ones((8, DRAFTS), dtype=np.float32) if known else None
    assert limited.plan(8, drafts) == PlannedBudget(8, PlanMode.DYNAMIC)
    assert limited.plan(8, drafts, num_other_rows=5).num_drafts == 3
    assert limited.plan(8, drafts, num_other_rows=9).num_drafts == 0


def test_a_step_up_that_must_be_filled_is_filled() -> None:
    costs = CostTables({1: 1.0}, {4: 100.0, 8: 120.0, 16: 300.0}, tiers=(4, 8, 16))
    drafts = survival((0.9, 0.5, 0.3), (0.9, 0.2, 0.1), (0.5, 0.1, 0.1))
    tested = planner(costs, falls_back=False)
    assert tested.plan(3, drafts) == PlannedBudget(5, PlanMode.DYNAMIC)


def test_where_planning_does_not_pay_it_rests_and_tries_again() -> None:
    """A flat curve: the same K at best, and the overhead makes it worse."""
    clock = itertools.count()
    flat = planner(FLAT, overhead_us=20.0, clock_us=lambda: float(next(clock)))
    drafts = np.full((4, DRAFTS), 0.9, dtype=np.float32)
    for _ in range(2000):
        assert flat.plan(4, drafts) == PlannedBudget(12, PlanMode.FIXED)
    assert next(clock) == 2 * flat.num_plans
    assert 17 <= flat.num_plans < 100
    gain = flat.expected_gain(4)
    assert gain is not None
    assert gain < 0.0


def test_a_gain_within_the_noise_of_the_costs_is_no_gain() -> None:
    drafts = survival((1.0, 0.9, 0.2), (1.0, 0.9, 0.2))

    def modes(noise: float) -> set[PlanMode]:
        costs = CostTables(STEEP.draft_us, STEEP.verify_us, relative_noise=noise)
        tested = planner(costs)
        return {tested.plan(2, drafts).mode for _ in range(200)}

    exact = planner(falls_back=False)
    for _ in range(3):
        exact.plan(2, drafts)
    gain = exact.expected_gain(2)
    assert gain is not None
    assert gain > 0.0
    assert PlanMode.DYNAMIC in modes(gain / 2)
    assert modes(2 * gain) == {PlanMode.FIXED}


PAYING = {"fixed_us": 180.0, "planned_us": 150.0}
"""Times of rounds of GOOD_AND_BAD as the tables have them: of all 8 rows, and of 5."""


def test_plans_are_carried_out_by_turns_when_they_are_known_to_pay() -> None:
    modes = rounds(planner(), GOOD_AND_BAD, 400, **PAYING)
    found = turns(modes)
    # Twenty steps to time, sixteen gains, the first of them with the third plan, a fixed turn.
    assert found[0] == (PlanMode.FIXED, 38 + 1 + 8)
    assert [length for mode, length in found if mode is PlanMode.DYNAMIC][:4] == [8, 16, 32, 64]
    assert {length for mode, length in found[1:] if mode is PlanMode.FIXED} == {8}


def test_after_a_rest_plans_are_carried_out_once_they_pay() -> None:
    tested = planner(STEEP)
    sure = np.ones((2, DRAFTS), dtype=np.float32)
    # Nothing is gained by leaving sure drafts out.
    assert set(rounds(tested, sure, 45, **PAYING)) == {PlanMode.FIXED}
    assert tested.num_plans < 25
    modes = rounds(tested, GOOD_AND_BAD, 900, **PAYING)
    first = modes.index(PlanMode.DYNAMIC)
    # Neither during the rest nor before there were enough gains.
    assert 512 < first < 600
    assert modes[first:].count(PlanMode.DYNAMIC) > 0.75 * len(modes[first:])


def test_an_old_choice_is_worth_what_newer_drafts_make_of_it() -> None:
    """Batches that are good and bad by turns: the K of one is wrong for the other."""
    good, bad = np.ones((2, DRAFTS), dtype=np.float32), np.zeros((2, DRAFTS), dtype=np.float32)
    tested = planner(STEEP)
    # Two plans lie between a choice and its drafts, so pairs meet their opposite.
    modes = [tested.plan(2, drafts).mode for drafts in [good, good, bad, bad] * 60]
    gain = tested.expected_gain(2)
    assert gain is not None
    assert gain < 0.0
    assert modes[-1] is PlanMode.FIXED


def test_sizes_are_judged_apart() -> None:
    tested = planner(FLAT, overhead_us=20.0)
    for _ in range(50):
        tested.plan(4, np.full((4, DRAFTS), 0.9, dtype=np.float32))
    assert tested.expected_gain(4) is not None
    assert tested.expected_gain(8) is None


def test_own_time_is_charged() -> None:
    """Without a given overhead a slow planner finds that planning does not pay."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))

    def modes(plan_us: float) -> set[PlanMode]:
        clock = itertools.count()
        tested = planner(overhead_us=None, clock_us=lambda: next(clock) * plan_us)
        found = {tested.plan(8, drafts).mode for _ in range(90)}
        assert tested.overhead_us == pytest.approx(plan_us, rel=0.7)
        return found

    assert PlanMode.DYNAMIC in modes(1.0)
    assert modes(1000.0) == {PlanMode.FIXED}


def test_where_the_host_is_the_limit_nothing_is_left_out() -> None:
    """Rows cost the device much, but it waits for the host anyway."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    # All 32 rows take the device 430 us, the 20 that pay 310.
    assert PlanMode.DYNAMIC in rounds(planner(), drafts, 100, host_us=50.0, fixed_us=430.0)
    assert set(rounds(planner(), drafts, 2000, host_us=900.0, fixed_us=430.0)) == {PlanMode.FIXED}


def test_rounds_in_which_a_plan_was_looked_at_are_of_neither_kind() -> None:
    """The host's work on plans that nobody carries out is none of fixed rounds'."""
    tested = planner()
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    looked_at = []
    for _ in range(38):
        tested.plan(8, drafts)
        # If it counted, the host would be the limit and every draft free.
        host_us = 900.0 if tested.kind is RoundKind.WATCHED else 50.0
        tested.add_round(Round(8, 32, tested.kind, max(430.0, host_us), host_us))
        if tested.kind is RoundKind.WATCHED:
            looked_at.append(tested.foregone)
    assert looked_at == [12] * 18


def test_between_host_and_device_drafts_are_left_out_down_to_the_hosts_time() -> None:
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    free, bound = planner(), planner()
    rounds(free, drafts, 100, host_us=0.0, fixed_us=430.0, planned_us=310.0)
    rounds(bound, drafts, 100, host_us=390.0, fixed_us=430.0, planned_us=390.0)
    fewest = free.plan(8, drafts)
    more = bound.plan(8, drafts)
    assert fewest == PlannedBudget(12, PlanMode.DYNAMIC)
    # 28 rows take the device 390 us: 20 drafts are as many as the host gives time for.
    assert more == PlannedBudget(20, PlanMode.DYNAMIC)


def test_plans_that_turn_out_slower_than_reckoned_are_given_up_for_longer_and_longer() -> None:
    """Dealing a budget out costs the device something that no table knows."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    tested = planner()
    modes = rounds(tested, drafts, 12_000, fixed_us=430.0, planned_us=430.0)
    found = turns(modes)
    planned = [length for mode, length in found if mode is PlanMode.DYNAMIC]
    rests = [length for mode, length in found[1:] if mode is PlanMode.FIXED and length > 100]
    assert max(planned) <= 16
    assert rests[:3] == sorted(rests[:3])
    assert rests[2] > 2000
    # Nearly all of them when it was known that nothing is saved, and no token is given for it.
    assert sum(planned) < 0.07 * len(modes)


def test_confidences_that_promise_too_much_of_leaving_drafts_out_are_found_out() -> None:
    """They say that half of the batch has bad drafts, and all are accepted."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))

    def modes(accepted: int) -> set[PlanMode]:
        tested = planner()
        found = set()
        for _ in range(600):
            found.add(tested.plan(8, drafts).mode)
            if tested.foregone is not None:
                tested.add_outcome(tested.foregone, drafts, np.array([3, accepted] * 4))
        return found

    assert modes(0) == set(PlanMode)
    assert modes(3) == {PlanMode.FIXED}


def test_plans_that_are_as_fast_as_reckoned_are_compared_now_and_then() -> None:
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    modes = rounds(planner(), drafts, 3000, fixed_us=430.0, planned_us=310.0)
    first = modes.index(PlanMode.DYNAMIC)
    assert modes[first:].count(PlanMode.DYNAMIC) / len(modes[first:]) > 0.95
    assert max(length for mode, length in turns(modes[first:]) if mode is PlanMode.FIXED) == 8


def test_a_machine_on_which_plans_do_not_pay_any_more_is_noticed() -> None:
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    tested = planner()
    rounds(tested, drafts, 3000, fixed_us=430.0, planned_us=310.0)
    modes = rounds(tested, drafts, 6000, fixed_us=430.0, planned_us=430.0)
    assert modes.count(PlanMode.DYNAMIC) < 0.3 * 6000
    # Later and later tries.
    assert modes[-3000:].count(PlanMode.DYNAMIC) < 0.1 * 3000


def test_a_slow_spell_that_begins_with_the_plans_is_not_their_fault() -> None:
    """The whole machine is a third slower, from the first planned round on."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    tested = planner()
    modes = rounds(tested, drafts, 38, fixed_us=430.0)
    assert PlanMode.DYNAMIC not in modes
    modes = rounds(tested, drafts, 1000, fixed_us=600.0, planned_us=432.0)
    assert modes.count(PlanMode.DYNAMIC) > 900


@pytest.mark.parametrize("gain", [-0.03, 0.05])
def test_a_small_gain_is_found_in_the_noise_of_rounds(gain: float) -> None:
    """Rounds scatter by a tenth; what was reckoned is +37 %."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    generator = np.random.default_rng(3)
    exact = planner()
    rounds(exact, drafts, 60, fixed_us=430.0, planned_us=310.0)
    reckoned = exact.expected_gain(8)
    assert reckoned is not None
    planned_us = 310.0 * (1.0 + reckoned) / (1.0 + gain)
    shares = []
    for _ in range(20):
        tested, modes = planner(), []
        for _ in range(3000):
            fixed_us, noisy_us = generator.normal((430.0, planned_us), 43.0).tolist()
            modes += rounds(tested, drafts, 1, fixed_us=fixed_us, planned_us=noisy_us)
        shares.append(modes.count(PlanMode.DYNAMIC) / len(modes))
    if gain > 0.0:
        assert np.mean(shares) > 0.7
    else:
        assert -gain * np.mean(shares) < 0.01


@pytest.mark.parametrize(("dip", "goes_on"), [(0.05, True), (-0.05, False)])
def test_a_gain_that_dips_below_its_noise_ends_no_turns(dip: float, goes_on: bool) -> None:
    """Before both kinds of rounds are compared, only a loss does."""
    record = PlanRecord(turns=RoundTurns())
    for _ in range(20):
        record.add_plan(1.2, 1.0)
    assert record.pays(0.1) is True
    for _ in range(200):
        record.add_plan(1.0 + dip, 1.0)
    assert record.pays(0.1) is (None if goes_on else False)
    record.turns = None
    assert record.pays(0.1) is False


def test_plans_that_verify_all_drafts_are_planned_rounds() -> None:
    """The same time as fixed ones, and no reason to give up: at other times they cut."""
    sure = np.ones((8, DRAFTS), dtype=np.float32)
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    tested = planner()
    rounds(tested, drafts, 400, fixed_us=430.0, planned_us=310.0)
    kinds = set()
    for _ in range(40):
        rounds(tested, sure, 1, fixed_us=430.0)
        kinds.add(tested.kind)
    assert RoundKind.PLANNED in kinds
    modes = rounds(tested, drafts, 300, fixed_us=430.0, planned_us=310.0)
    assert modes.count(PlanMode.DYNAMIC) > 250


def test_turns_whose_rounds_are_never_timed_are_given_up() -> None:
    """Prompts come between any two decode steps: nothing is known of how long plans take."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    tested = planner()
    modes = [tested.plan(8, drafts).mode for _ in range(5000)]
    first = modes.index(PlanMode.DYNAMIC)
    ends = [number for number, (mode, length) in enumerate(turns(modes)) if length > 500]
    assert ends
    assert 0 < modes[first:].count(PlanMode.DYNAMIC) < 0.4 * len(modes[first:])


def test_sizes_by_turns_are_given_up_where_no_round_can_be_timed() -> None:
    """A batch hovers between two sizes, and never is a round like the two before it."""
    tested = planner()
    sizes = [np.tile(GOOD_AND_BAD, (count, 1)) for count in (4, 1)]
    modes = [tested.plan(len(drafts), drafts).mode for _ in range(4000) for drafts in sizes]
    assert PlanMode.DYNAMIC in modes
    assert modes.count(PlanMode.DYNAMIC) < 0.4 * len(modes)


def test_what_is_never_known_to_pay_is_given_up() -> None:
    """Sixteen turns without a decision; the gain is there, and small beside its noise."""
    record = PlanRecord(turns=RoundTurns())
    turn = record.turns
    assert turn is not None
    generator = np.random.default_rng(0)
    for number in range(2000):
        record.add_plan(1.04 + 0.3 * (-1.0) ** number, 1.0)
        time_us = float(generator.normal(100.0, 1.0))
        turn.add(100.0, time_us, is_planned=turn.is_planned)
        record.count_step(0.0, lambda device_us, is_planned: device_us)
        if record.turns is None:
            break
    assert turn.num_undecided == 16
    assert record.num_fixed == 512
    assert record.num_rests == 1024


def test_plans_that_were_to_save_little_and_cost_more_are_given_up() -> None:
    """Four drafts of no use: by the tables 4 % of a round, and dealing them out takes 5 %."""
    drafts = survival(*[(1.0, 0.99, 0.98)] * 15, (0.02, 0.01, 0.01))
    costs = CostTables({1: 10.0}, {1: 300.0, 100: 1290.0})
    tested = planner(costs)
    modes = rounds(tested, drafts, 3000, fixed_us=940.0, planned_us=980.0)
    assert PlanMode.DYNAMIC in modes
    assert modes.count(PlanMode.DYNAMIC) < 0.15 * len(modes)


@given(saving=st.floats(0.0, 2.0), shares=st.lists(st.floats(0.01, 1.2), min_size=2))
def test_no_saving_makes_rounds_take_no_time_or_more_rows_cheaper(
    saving: float, shares: list[float]
) -> None:
    record = PlanRecord(turns=RoundTurns())
    assert record.turns is not None
    record.turns.saving = saving
    times = record.real_time(np.array(sorted(shares)))
    assert (times > 0.0).all()
    assert (np.diff(times) >= 0.0).all()


@pytest.mark.parametrize("saving", [0.3, 1.0])
def test_drafts_are_left_out_for_what_that_really_saves(saving: float) -> None:
    """The tables are of a moment in which rows were dear."""
    drafts = survival(*[(0.9, 0.8, 0.7)] * 6, *[(0.5, 0.15, 0.05)] * 6)
    tested = planner()
    generator = np.random.default_rng(1)
    watch = Watch()
    verified = []
    for _ in range(600):
        budget = tested.plan(len(drafts), drafts)
        # 48 rows take 590 us, and each one less 10 us less by the tables.
        num_rows = len(drafts) + budget.num_drafts
        time_us = 590.0 - saving * 10.0 * (48 - num_rows)
        time_us *= float(generator.normal(1.0, 0.01))
        watch.ended(tested, Round(len(drafts), num_rows, tested.kind, time_us, 0.0))
        if tested.kind is RoundKind.PLANNED:
            verified.append(budget.num_drafts)
    rates = [
        (12 + sum(sorted(drafts.ravel().tolist())[::-1][:count]))
        / (590.0 - saving * 10.0 * (36 - count))
        for count in range(37)
    ]
    best = int(np.argmax(rates))
    assert abs(verified[-1] - best) <= 1
    gain = tested.expected_gain(12)
    assert gain == pytest.approx(rates[best] / rates[-1] - 1.0, abs=0.01)


def test_a_try_that_went_well_for_long_makes_the_next_rest_short() -> None:
    record = PlanRecord(turns=RoundTurns(), num_rests=4096)
    turn = record.turns
    assert turn is not None
    for _ in range(20):
        record.add_plan(1.2, 1.0)
    while not turn.is_long:
        assert record.num_rests == 4096
        turn.add(100.0, 100.0, is_planned=turn.is_planned)
        record.count_step(0.0, lambda device_us, is_planned: device_us)
    assert record.num_rests == 512


def test_a_rest_after_plans_that_were_not_carried_out_is_short_again() -> None:
    record = PlanRecord(turns=RoundTurns(), num_fixed=0)
    rests = []
    for has_turns in (True, True, False, True):
        record.turns = RoundTurns() if has_turns else None
        record.give_up()
        rests.append(record.num_fixed)
    assert rests == [512, 1024, 512, 2048]


def test_a_limit_of_rows_leaves_the_record_as_it_is() -> None:
    """There is nothing to compare with where the fixed length never fits."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    tested = planner(max_rows=24)
    assert set(rounds(tested, drafts, 700, fixed_us=430.0)) == {PlanMode.DYNAMIC}
    assert tested.kind is RoundKind.PLANNED


def test_what_came_in_a_fixed_turn_is_counted_when_it_has_ended() -> None:
    """Counting takes the host about as long as a plan; rounds in between are compared."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    record = PlanRecord(turns=RoundTurns())
    assert record.turns is not None
    outcome = Outcome(12, drafts, np.full(8, DRAFTS))
    for _ in range(2):
        while not record.turns.is_planned:
            record.turns.add(1.0, 1.0, is_planned=False)
            record.add_outcome(outcome)
            assert record.foregone.correction == 1.0 or record.turns.newest is not None
            record.count_step(0.0, lambda device_us, is_planned: device_us)
        while record.turns.is_planned:
            record.turns.add(1.0, 1.0, is_planned=True)
            record.count_step(0.0, lambda device_us, is_planned: device_us)
    assert record.foregone.correction < 1.0


@pytest.mark.parametrize("num_compared", [4, 8, 16])
def test_plans_that_are_worth_nothing_are_seldom_known_to_lose(num_compared: int) -> None:
    """An error that is small by luck would end turns that do no harm."""
    generator = np.random.default_rng(num_compared)
    lost = 0
    for _ in range(400):
        record = PlanRecord(turns=RoundTurns())
        for _ in range(16):
            record.add_plan(1.0, 1.0)
        turn = record.turns
        assert turn is not None
        while turn.num_compared < num_compared:
            time_us = float(generator.normal(100.0, 5.0))
            turn.add(100.0, time_us, is_planned=turn.is_planned)
            turn.count_step(lambda device_us, is_planned: device_us)
        lost += record.pays(0.0) is False
    assert lost < 0.06 * 400


def test_rounds_that_all_grow_longer_are_no_reason_to_give_up() -> None:
    """The gain is a quarter, and in each hundred steps rounds grow by a tenth."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    tested = planner()
    modes = rounds(tested, drafts, 60, fixed_us=430.0, planned_us=310.0)
    for number in range(200):
        growth = 1.0 + number / 100
        modes += rounds(tested, drafts, 10, fixed_us=430 * growth, planned_us=310 * growth)
    assert max(length for mode, length in turns(modes) if mode is PlanMode.FIXED) < 60


def test_single_slow_rounds_decide_nothing() -> None:
    """Graphs are captured when a tier is first met, and prompts come between."""
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    tested = planner()
    modes = rounds(tested, drafts, 41, fixed_us=430.0, planned_us=310.0)
    for _ in range(200):
        modes += rounds(tested, drafts, 3, fixed_us=430.0, planned_us=310.0)
        modes += rounds(tested, drafts, 1, fixed_us=430.0, planned_us=300_000.0)
    assert modes[41:].count(PlanMode.DYNAMIC) > 0.85 * 800


def test_without_the_fall_back_rounds_are_not_listened_to() -> None:
    tested = planner(falls_back=False)
    drafts = np.tile(GOOD_AND_BAD, (4, 1))
    assert not tested.wants_round(8)
    modes = rounds(tested, drafts, 50, host_us=900.0, fixed_us=430.0, planned_us=900.0)
    assert set(modes) == {PlanMode.DYNAMIC}


def test_limits_that_leave_nothing_to_plan_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_drafts 0"):
        planner(max_drafts=0)
    with pytest.raises(ConfigError, match="max_rows 15 is below max_num_seqs 16"):
        planner(max_rows=15)


def test_survivals_of_another_batch_are_refused() -> None:
    with pytest.raises(ContractError, match=r"shape \(2, 3\); expected \(3, 3\)"):
        planner(falls_back=False).plan(3, GOOD_AND_BAD)
    with pytest.raises(ContractError, match="17 requests sample, max_num_seqs is 16"):
        planner().plan(17, None)
