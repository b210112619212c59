"""The scheduler alone: random lives of requests never share, lose or starve memory."""

from __future__ import annotations

from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.cache.block_pool import BlockPool, blocks_for
from deepinfer.device.errors import ContractError
from deepinfer.device.runtime import StepKind
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Request, Sequence, SequenceStatus

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS, MAX_TOKENS, MAX_CHUNK = 4, 6, 3, 10, 7
NO_TEXT = cast(OutputText, None)  # the scheduler never looks at text


def make_scheduler(
    released: list[tuple[int, list[int]]], num_blocks: int = NUM_BLOCKS
) -> Scheduler:
    return Scheduler(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=MAX_SEQS,
        max_num_tokens=MAX_TOKENS,
        max_chunk_tokens=MAX_CHUNK,
        on_release=lambda slot, blocks: released.append((slot, list(blocks))),
    )


def make_sequence(arrival: int, num_tokens: int, priority: int = 0) -> Sequence:
    tokens = list(range(num_tokens))
    request = Request(
        request_id=f"r{arrival}",
        prompt=None,
        prompt_token_ids=tokens,
        params=SamplingParams(),
        seed=0,
        priority=priority,
        arrival=arrival,
        deadline_s=None,
    )
    request.sequences = [Sequence(request, 0, list(tokens), NO_TEXT, max_len=10_000)]
    return request.sequences[0]


def run_step(scheduler: Scheduler) -> StepKind:
    """Schedule a step and commit it as the engine would; starved sequences end."""
    scheduled, starved = scheduler.schedule()
    for metadata in scheduled.sequences:
        sequence = metadata.sequence
        sequence.total_inflight_tokens -= metadata.query_len
        sequence.num_cached_tokens += metadata.query_len
        if metadata.samples:
            sequence.token_ids.append(7)
    for sequence in starved:
        scheduler.finish(sequence)
    return scheduled.kind


class SchedulerLife(RuleBasedStateMachine):
    """Requests come, run, are preempted and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[tuple[int, list[int]]] = []
        self.scheduler = make_scheduler(self.released)
        self.open: list[Sequence] = []
        self.arrivals = 0

    @rule(num_tokens=st.integers(1, BLOCK_SIZE * NUM_BLOCKS - 1), priority=st.integers(-1, 1))
    def add(self, num_tokens: int, priority: int) -> None:
        sequence = make_sequence(self.arrivals, num_tokens, priority)
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

    @rule()
    def step(self) -> None:
        scheduler = self.scheduler
        scheduled, starved = scheduler.schedule()
        chosen = [metadata.sequence for metadata in scheduled.sequences]
        assert (scheduled.kind is StepKind.EMPTY) == (not chosen)
        assert scheduled.num_rows <= MAX_TOKENS
        assert len({id(sequence) for sequence in chosen}) == len(chosen)
        assert chosen or starved or not self.open, "work is left and nothing runs"
        for metadata in scheduled.sequences:
            sequence = metadata.sequence
            stop = metadata.context_len + metadata.query_len
            assert metadata.context_len == sequence.num_cached_tokens
            assert stop == sequence.num_launched_tokens <= len(sequence.token_ids)
            assert metadata.samples == (stop == len(sequence.token_ids))
            assert len(sequence.blocks) * BLOCK_SIZE >= stop
            is_prefill = metadata.context_len < sequence.prefill_target
            assert is_prefill == (scheduled.kind is StepKind.PREFILL), "kinds are mixed"
            assert metadata.query_len <= (MAX_CHUNK if is_prefill else 1)
            sequence.total_inflight_tokens = 0
            sequence.num_cached_tokens = stop
            if metadata.samples:
                sequence.token_ids.append(7)
        if scheduled.kind is StepKind.DECODE:
            assert [s.order for s in chosen] == sorted(s.order for s in chosen)
        for sequence in starved:
            assert blocks_for(len(sequence.token_ids), BLOCK_SIZE) > NUM_BLOCKS
            scheduler.finish(sequence)
            self.open.remove(sequence)

    @invariant()
    def memory_has_one_holder(self) -> None:
        scheduler = self.scheduler
        held = [block for sequence in scheduler.running for block in sequence.blocks]
        assert len(set(held)) == len(held) == scheduler.blocks.num_used
        assert scheduler.blocks.num_free + scheduler.blocks.num_used == NUM_BLOCKS
        slots = [sequence.slot for sequence in scheduler.running]
        assert len(set(slots)) == len(slots) == scheduler.slots.num_used <= MAX_SEQS
        assert all(not s.blocks and s.slot is None for s in scheduler.waiting)

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
        assert self.scheduler.blocks.num_used == self.scheduler.slots.num_used == 0
        assert not self.scheduler.has_work


TestSchedulerLife = SchedulerLife.TestCase
TestSchedulerLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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
    released: list[tuple[int, list[int]]] = []
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


def test_the_pool_refuses_what_it_does_not_have() -> None:
    pool = BlockPool(2)
    held = pool.allocate(2)
    with pytest.raises(ContractError, match="block pool"):
        pool.allocate(1)
    pool.release(held[:1])
    with pytest.raises(ContractError, match="not in use"):
        pool.release(held[:1])
