"""The scheduler alone: random lives of requests never share, lose or starve memory."""

from __future__ import annotations

from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from deepinfer.cache.block_pool import blocks_for
from deepinfer.device.runtime import StepKind
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.prefill_hold import PrefillHold
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Request, Sequence, SequenceStatus
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS, MAX_TOKENS, MAX_CHUNK = 4, 6, 3, 10, 7
Released = tuple[int | None, list[int]]
NO_TEXT = cast(OutputText, None)  # the scheduler never looks at text


def make_scheduler(
    released: list[Released],
    num_blocks: int = NUM_BLOCKS,
    max_drafts: int = 0,
    *,
    shrinks_drafts: bool = True,
    wait_steps: int = 0,
) -> Scheduler:
    return Scheduler(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=MAX_SEQS,
        max_num_tokens=MAX_TOKENS,
        max_chunk_tokens=MAX_CHUNK,
        max_drafts=max_drafts,
        shrinks_drafts=shrinks_drafts,
        # The smallest crowd counts, and all of it has to leave: holds happen, and last.
        hold=PrefillHold(wait_steps, least_crowd=1, share=1),
        on_release=lambda slot, blocks: released.append((slot, list(blocks))),
    )


def make_sequence(
    arrival: int, num_tokens: int, priority: int = 0, max_len: int = 10_000
) -> Sequence:
    tokens = list(range(num_tokens))
    request = Request(
        request_id=f"r{arrival}",
        prompt=None,
        prompt_token_ids=tokens,
        params=SamplingParams(),
        controls=RequestControls.of(SamplingParams(), 9),
        seed=0,
        priority=priority,
        arrival=arrival,
        deadline_s=None,
    )
    request.sequences = [Sequence(request, 0, list(tokens), NO_TEXT, max_len=max_len)]
    return request.sequences[0]


def commit_step(
    scheduler: Scheduler, scheduled: SchedulerOutputs, accepted: int = 0
) -> list[Sequence]:
    """Collect and commit a step as the engine would; the sequences that reached their limit."""
    scheduler.collected(scheduled.step)
    ended = []
    for metadata in scheduled.sequences:
        sequence = metadata.sequence
        if not metadata.is_current:
            continue
        is_decode = scheduled.kind is StepKind.DECODE
        kept = min(1 + accepted, metadata.query_len) if is_decode else metadata.query_len
        sequence.total_inflight_tokens -= metadata.query_len
        sequence.num_inflight_samples -= metadata.samples
        sequence.num_cached_tokens += kept
        if metadata.known_token >= 0:
            assert metadata.samples
            assert sequence.token_ids[sequence.num_cached_tokens :] == [metadata.known_token]
        elif metadata.samples:
            num_tokens = kept if is_decode else 1
            room = sequence.max_len - len(sequence.token_ids)
            sequence.token_ids += [7] * min(num_tokens, room)
            if len(sequence.token_ids) == sequence.max_len:
                scheduler.finish(sequence)
                ended.append(sequence)
    return ended


def run_step(scheduler: Scheduler) -> StepKind:
    """Schedule a step and commit it at once; starved sequences end."""
    scheduled, starved = scheduler.schedule()
    if scheduled.kind is not StepKind.EMPTY:
        commit_step(scheduler, scheduled)
    for sequence in starved:
        scheduler.finish(sequence)
    return scheduled.kind


class SchedulerLife(RuleBasedStateMachine):
    """Requests come, run, are preempted and end in any order, with up to two steps in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[Released] = []
        self.scheduler = make_scheduler(self.released)
        self.open: list[Sequence] = []
        self.inflight: list[SchedulerOutputs] = []
        # Memory that a launched step may use, as it was when the step was launched.
        self.used: list[dict[int, str]] = []
        self.arrivals = 0

    @initialize(
        max_drafts=st.sampled_from([0, 1, 5]),
        shrinks_drafts=st.booleans(),
        wait_steps=st.sampled_from([0, 2, 16]),
    )
    def begin(self, max_drafts: int, shrinks_drafts: bool, wait_steps: int) -> None:
        self.shrinks_drafts = shrinks_drafts
        self.max_drafts = max_drafts
        self.scheduler = make_scheduler(
            self.released,
            max_drafts=max_drafts,
            shrinks_drafts=shrinks_drafts,
            wait_steps=wait_steps,
        )

    @rule(
        num_tokens=st.integers(1, BLOCK_SIZE * NUM_BLOCKS - 1),
        priority=st.integers(-1, 1),
        more=st.integers(1, 30),
    )
    def add(self, num_tokens: int, priority: int, more: int) -> None:
        sequence = make_sequence(self.arrivals, num_tokens, priority, num_tokens + more)
        self.arrivals += 1
        self.open.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.open))
        generation = sequence.generation
        self.open.remove(sequence)
        self.scheduler.finish(sequence)
        assert sequence.generation > generation
        assert (sequence.blocks, sequence.slot) == ([], None)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.scheduler.running))
        self.scheduler.preempt(sequence)
        assert (sequence.num_launched_tokens, sequence.status) == (0, SequenceStatus.WAITING)

    @precondition(lambda self: self.inflight)
    @rule(accepted=st.integers(0, 5))
    def collect(self, accepted: int) -> None:
        step = self.inflight.pop(0)
        self.used.pop(0)
        for sequence in commit_step(self.scheduler, step, accepted):
            self.open.remove(sequence)

    @precondition(lambda self: len(self.inflight) < 3)
    @rule()
    def launch(self) -> None:
        scheduler = self.scheduler
        scheduled, starved = scheduler.schedule()
        chosen = [metadata.sequence for metadata in scheduled.sequences]
        assert (scheduled.kind is StepKind.EMPTY) == (not chosen)
        assert scheduled.num_rows <= MAX_TOKENS
        assert len(set(chosen)) == len(chosen)
        is_stuck = not (chosen or starved or self.inflight)
        assert not (is_stuck and self.open), "work is left and nothing runs"
        for metadata in scheduled.sequences:
            self.check_row(scheduled.kind, metadata)
        if scheduled.kind is StepKind.DECODE:
            assert [s.order for s in chosen] == sorted(s.order for s in chosen)
        for sequence in starved:
            assert blocks_for(len(sequence.token_ids), BLOCK_SIZE) > NUM_BLOCKS
            assert sequence.total_inflight_tokens == 0
            scheduler.finish(sequence)
            self.open.remove(sequence)
        if chosen:
            self.inflight.append(scheduled)
            self.used.append({block: s.request.request_id for s in chosen for block in s.blocks})

    def check_row(self, kind: StepKind, metadata: SequenceMetadata) -> None:
        sequence = metadata.sequence
        stop = metadata.context_len + metadata.query_len
        assert stop == sequence.num_launched_tokens
        # Room for the most that what is in flight may come to, but never beyond the limit.
        assert len(sequence.blocks) * BLOCK_SIZE >= min(stop, sequence.max_len - 1)
        is_prefill = metadata.context_len < sequence.prefill_target
        assert is_prefill == (kind is StepKind.PREFILL), "kinds are mixed"
        if is_prefill:
            assert metadata.samples == (stop == sequence.prefill_target)
            resumes = sequence.prefill_target < len(sequence.token_ids)
            assert sequence.prefill_target == len(sequence.token_ids) - resumes
            may_resume = self.max_drafts > 0 and sequence.num_output_tokens > 0
            assert may_resume or not resumes
            # A second time without a token it draws one, unless the run is deterministic.
            assert resumes or self.shrinks_drafts or not may_resume
            assert (metadata.known_token >= 0) == (metadata.samples and resumes)
            if metadata.samples and resumes:
                assert sequence.least_len == len(sequence.token_ids)
            assert metadata.query_len <= MAX_CHUNK
        else:
            assert metadata.samples
            assert metadata.query_len <= 1 + self.max_drafts
            assert sequence.least_len <= sequence.max_len

    @invariant()
    def memory_has_one_holder(self) -> None:
        scheduler = self.scheduler
        held = [block for sequence in scheduler.running for block in sequence.blocks]
        deferred = scheduler.num_deferred_blocks
        assert len(set(held)) == len(held) == scheduler.blocks.num_used - deferred
        assert scheduler.blocks.num_free + scheduler.blocks.num_used == NUM_BLOCKS
        slots = [sequence.slot for sequence in scheduler.running]
        assert len(set(slots)) == len(slots) <= scheduler.slots.num_used <= MAX_SEQS
        assert all(not s.blocks and s.slot is None for s in scheduler.waiting)

    @invariant()
    def no_step_in_flight_uses_memory_of_another(self) -> None:
        for used in self.used:
            for sequence in self.scheduler.running:
                for block in sequence.blocks:
                    assert used.get(block, sequence.request.request_id) == (
                        sequence.request.request_id
                    )

    @invariant()
    def everyone_stands_in_one_queue_in_order(self) -> None:
        scheduler = self.scheduler
        for queue in (scheduler.running, scheduler.waiting):
            assert [s.order for s in queue] == sorted(s.order for s in queue)
        queued = [*map(id, scheduler.running), *map(id, scheduler.waiting)]
        assert sorted(queued) == sorted(map(id, self.open))

    def teardown(self) -> None:
        for sequence in list(self.open):
            self.scheduler.finish(sequence)
        for step in self.inflight:
            self.scheduler.collected(step.step)
        assert self.scheduler.blocks.num_used == self.scheduler.slots.num_used == 0
        assert not self.scheduler.has_work


TestSchedulerLife = SchedulerLife.TestCase
TestSchedulerLife.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_prefill_runs_before_decode_and_in_chunks() -> None:
    scheduler = make_scheduler([])
    scheduler.add(make_sequence(0, 3))
    assert run_step(scheduler) is StepKind.PREFILL
    scheduler.add(make_sequence(1, 8))
    kinds = [run_step(scheduler) for _ in range(3)]
    assert kinds == [StepKind.PREFILL, StepKind.PREFILL, StepKind.DECODE]


def test_a_step_holds_no_more_rows_than_allowed() -> None:
    scheduler = make_scheduler([])
    for arrival in range(3):
        scheduler.add(make_sequence(arrival, 6))
    scheduled, _ = scheduler.schedule()
    assert [metadata.query_len for metadata in scheduled.sequences] == [6, 4]


def test_the_last_in_order_is_preempted_and_comes_back() -> None:
    released: list[Released] = []
    scheduler = make_scheduler(released, num_blocks=3)
    first, last = make_sequence(0, 3), make_sequence(1, 3)
    scheduler.add(last)
    scheduler.add(first)
    while scheduler.num_preemptions == 0:
        run_step(scheduler)
    assert last.status is SequenceStatus.WAITING
    assert first.status is SequenceStatus.RUNNING
    assert len(released) == 1
    assert last.generation == 1
    scheduler.finish(first)
    assert run_step(scheduler) is StepKind.PREFILL
    assert last.prefill_target == len(last.token_ids) - 1 == last.num_cached_tokens


@pytest.mark.parametrize("shrinks_drafts", [True, False])
def test_nobody_is_preempted_for_drafts(shrinks_drafts: bool) -> None:
    """Where answers may depend on company; a deterministic run has room for all of them."""
    scheduler = make_scheduler([], 4, max_drafts=5, shrinks_drafts=shrinks_drafts)
    # Each has two blocks; the second ends before the first one's next token needs a third.
    for arrival, num_blocks in enumerate((3, 2)):
        scheduler.add(make_sequence(arrival, BLOCK_SIZE, max_len=num_blocks * BLOCK_SIZE + 1))
    rows = []
    while scheduler.has_work:
        scheduled, starved = scheduler.schedule()
        assert not starved
        rows.append([metadata.query_len for metadata in scheduled.sequences])
        commit_step(scheduler, scheduled, accepted=5)
    assert (scheduler.num_preemptions == 0) == shrinks_drafts
    if shrinks_drafts:
        assert max(max(step) for step in rows[1:]) > 1, "no draft was verified"


def test_an_urgent_request_waits_for_memory_rather_than_preempt() -> None:
    scheduler = make_scheduler([], num_blocks=2)
    calm = make_sequence(0, 7)
    scheduler.add(calm)
    run_step(scheduler)
    scheduler.add(make_sequence(1, 3, priority=-1))
    run_step(scheduler)
    assert calm.status is SequenceStatus.RUNNING


def test_one_that_outgrows_the_whole_cache_is_handed_back() -> None:
    scheduler = make_scheduler([], num_blocks=1)
    sequence = make_sequence(0, 3)
    scheduler.add(sequence)
    run_step(scheduler)
    run_step(scheduler)
    scheduled, starved = scheduler.schedule()
    assert (scheduled.kind, starved) == (StepKind.EMPTY, [sequence])


def test_newcomers_do_not_wait_for_company_while_nobody_decodes() -> None:
    scheduler = make_scheduler([], wait_steps=16)
    short, other, large = make_sequence(0, 4, max_len=6), make_sequence(1, 8), make_sequence(2, 12)
    for sequence in (short, other, large):
        scheduler.add(sequence)
    while large.status is SequenceStatus.WAITING and short.num_output_tokens < 1:
        run_step(scheduler)
    run_step(scheduler)
    assert large.status is SequenceStatus.WAITING  # no room: it waits for the others to leave
    scheduled, _ = scheduler.schedule()
    assert scheduled.kind is StepKind.DECODE
    assert not short.decodes_next, "its last token is in flight"
    scheduler.finish(other)
    scheduler.collected(scheduled.step)  # gives the memory of the other back
    scheduled, _ = scheduler.schedule()
    assert scheduled.kind is StepKind.PREFILL
    assert [metadata.sequence for metadata in scheduled.sequences] == [large]
