"""Which sequences run in the next step, and who holds memory.

A step is PREFILL or DECODE, never both. Prefill goes first: it ends waiting soonest and fills
later decode steps; in a full batch alone newcomers wait for company (`prefill_hold.py`). Sequences
are taken by priority, then arrival. When KV runs out while decoding, the last in that order is
preempted: it gives everything back and is computed again later, from its committed tokens.

    sequence   WAITING --admit--> RUNNING --finish--> FINISHED
                  ^                  |
                  +----- preempt ----+                    (generation + 1 at preempt and finish)

    memory     free --admit, grow--> held --preempt, finish--> deferred --step collected--> free

Steps are scheduled while others are in flight. Lengths are then upper bounds: what is launched
and not committed counts as if every draft were accepted, so a launched step always has its room
(ZO-3). A sequence that lacks room which deferred memory will give, or whose own results are still
out, sits a step out. It is neither preempted nor ended on a guess.

Rounds of speculation stay where they were over a preemption. The prefill ends before the newest
token, whose row in the last step yields that token once more, and the drafts after it. Computed to
its end instead, the answer would go on without drafts, and a seeded one with other random numbers.

With a prefix cache, full blocks of committed tokens are published. A newcomer takes over the
blocks of its beginning that are known, holds them like its own, and never writes them. Blocks that
nobody holds stay known until their memory is needed.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import logging
from collections.abc import Callable, Collection
from typing import cast

from deepinfer.cache.block_pool import BlockPool, SlotPool, blocks_for
from deepinfer.cache.host_tier import HostState
from deepinfer.device.runtime import StepKind
from deepinfer.engine.deferred_release import DeferredRelease
from deepinfer.engine.outputs import FinishReason
from deepinfer.engine.prefill_hold import PrefillHold
from deepinfer.engine.prefix_hit import PrefixHit
from deepinfer.engine.prefix_reuse import PrefixReuse
from deepinfer.engine.sequence import Sequence, SequenceStatus
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata

_log = logging.getLogger(__name__)


class Growth(enum.Enum):
    """Why a sequence gets no rows in this step."""

    LATER = "later"
    NEVER = "never"


class Scheduler:
    """Admission, chunked prefill, decode, preemption by recompute."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_chunk_tokens: int,
        max_drafts: int = 0,
        shrinks_drafts: bool = True,
        hold: PrefillHold | None = None,
        reuse: PrefixReuse | None = None,
        on_release: Callable[[int | None, Collection[int]], None],
    ) -> None:
        """An empty scheduler.

        Args:
            block_size: tokens per KV block.
            num_blocks: blocks of the pool.
            max_num_seqs: sequences that may run at once.
            max_num_tokens: rows of a step.
            max_chunk_tokens: prefill rows of one sequence in a step.
            max_drafts: drafts verified with each token in a decode step.
            shrinks_drafts: verify fewer of them rather than preempt somebody for their room. A
                seeded answer then depends on its company.
            hold: when newcomers wait for company; None: never.
            reuse: what is known of earlier sequences; None keeps nothing.
            on_release: called with slot and blocks when nothing on the device reads them any
                more, before anybody else gets them; with None for a slot when blocks alone go.
        """
        self.block_size = block_size
        self.reuse = reuse
        self.blocks = BlockPool(
            num_blocks,
            None if reuse is None else reuse.cache.index,
            on_evict=lambda blocks: on_release(None, blocks),
        )
        self.slots = SlotPool(max_num_seqs)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._prefilling: list[Sequence] = []  # of those running
        self.num_preemptions = 0
        self._num_steps = 0
        self._num_promised = 0
        self._max_drafts, self._shrinks_drafts = max_drafts, shrinks_drafts
        self._hold = hold or PrefillHold(0)
        self._deferred = DeferredRelease(self._give_back)
        self._max_num_tokens = max_num_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._on_release = on_release

    @property
    def num_steps(self) -> int:
        """Steps scheduled so far, empty ones not counted."""
        return self._num_steps

    @property
    def num_deferred_blocks(self) -> int:
        """Blocks that nobody holds and the device may still read."""
        return self._deferred.num_blocks

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.status = SequenceStatus.WAITING
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.order)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> tuple[SchedulerOutputs, list[Sequence]]:
        """Decide the next step.

        Returns:
            The step (kind EMPTY when nothing can run) and the sequences that can never go on,
            because one alone needs more KV than there is; the caller ends them.
        """
        self._let_go_of_saved()
        prefill = self._schedule_prefill()
        if prefill:
            return self._step(StepKind.PREFILL, prefill), []
        decode, starved = self._schedule_decode()
        if not (decode or starved):
            # Nobody else can use the time of a load: the device waits for it, not the host.
            prefill = self._schedule_prefill(awaits_loads=True)
            if prefill:
                return self._step(StepKind.PREFILL, prefill), []
        # A preempted sequence may have outgrown the pool; left at the head it would block all.
        if self.waiting and self._blocks_to_admit(self.waiting[0]) > self.blocks.num_blocks:
            starved.append(self.waiting[0])
        return self._step(StepKind.DECODE if decode else StepKind.EMPTY, decode), starved

    def _step(self, kind: StepKind, chosen: list[SequenceMetadata]) -> SchedulerOutputs:
        step = self._num_steps
        if chosen:
            self._num_steps += 1
        for sequence, _, _, _, query_len, samples, *_ in chosen:
            sequence.last_step = step
            sequence.total_inflight_tokens += query_len
            sequence.num_inflight_samples += samples
        return SchedulerOutputs(step, kind, tuple(chosen))

    @property
    def _is_saving(self) -> bool:
        tier = None if self.reuse is None else self.reuse.tier
        return tier is not None and tier.is_saving

    def _let_go_of_saved(self) -> None:
        if self.reuse is not None and self.reuse.tier is not None:
            for blocks in self.reuse.tier.take_saved():
                self._give_back(None, list(blocks))

    def drain(self) -> None:
        """Wait for copies to host memory, so that the blocks they read are nobody's."""
        if self.reuse is not None and self.reuse.tier is not None:
            self.reuse.tier.drain()
            self._let_go_of_saved()

    def _schedule_prefill(self, *, awaits_loads: bool = False) -> list[SequenceMetadata]:
        # What was launched since it was admitted may be all of it.
        self._prefilling = [sequence for sequence in self._prefilling if sequence.needs_prefill]
        chosen: list[SequenceMetadata] = []
        budget = self._max_num_tokens
        for sequence in self._prefilling:
            if budget == 0:
                break
            if awaits_loads or not sequence.is_loading:
                chosen.append(self._chunk(sequence, budget))
                budget -= chosen[-1].query_len
        if self.waiting:
            waits = self._hold.is_on(self._num_steps, len(self.running), self.waiting[0])
            # With prefill to do in any case, or nobody to decode, no step is saved by waiting.
            if not waits or chosen or awaits_loads:
                self._admit_waiting(chosen, budget, awaits_loads=awaits_loads)
        return chosen

    def _admit_waiting(
        self, chosen: list[SequenceMetadata], budget: int, *, awaits_loads: bool
    ) -> None:
        num_owed = self._num_owed()
        while budget > 0 and self.waiting:
            if not self._admit(self.waiting[0], num_owed):
                # Slots that are not given back yet count: their sequences have left already.
                self._hold.begin(self._num_steps, self.slots.num_used, self.waiting[0])
                return
            sequence = self.waiting.pop(0)
            if awaits_loads or not sequence.is_loading:
                chosen.append(self._chunk(sequence, budget))
                budget -= chosen[-1].query_len

    def _blocks_to_admit(self, sequence: Sequence) -> int:
        """Blocks of all its tokens, and of one more where the pool has that much at all.

        The spare position keeps a newcomer from preempting somebody in its first decode step.
        """
        length = len(sequence.token_ids)
        spared = blocks_for(length + 1, self.block_size)
        return max(blocks_for(length, self.block_size), min(spared, self.blocks.num_blocks))

    def _prefill_len(self, sequence: Sequence) -> int:
        """Positions to compute of a newcomer before it decodes.

        With drafts it goes on with the round it was in. If it lost its memory without a token since
        it last did so, the prompt's end yields one, or a sequence that is always taken back would
        never get on; not in a deterministic run, in which the first in the order always gets on.
        """
        since = sequence.resumed_at if self._shrinks_drafts else 0
        resumes_round = self._max_drafts > 0 and sequence.num_output_tokens > since
        return len(sequence.token_ids) - resumes_round

    def _admit(self, sequence: Sequence, num_owed: int) -> bool:
        """Give a waiting sequence its slot and its blocks; False: there is no room now."""
        if self.slots.num_free == 0:
            return False
        reuse = self.reuse
        sequence.prefill_target = self._prefill_len(sequence)
        hit = PrefixHit(rows=sequence.rows) if reuse is None else reuse.look_up(sequence)
        needed = self._blocks_to_admit(sequence) - len(hit.blocks)
        if needed > self.blocks.num_free - self.blocks.count_idle(hit.blocks) - num_owed:
            return False
        sequence.resumed_at = sequence.num_output_tokens
        sequence.slot = self.slots.allocate()
        # Held first: allocating may evict.
        self.blocks.hold(hit.blocks)
        sequence.blocks = [*hit.blocks, *self.blocks.allocate(needed)]
        if reuse is None:
            sequence.begin(hit)
        else:
            reuse.admit(sequence, hit)
        sequence.status = SequenceStatus.RUNNING
        for admitted in (self.running, self._prefilling):
            bisect.insort(admitted, sequence, key=lambda running: running.order)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Hear that a running sequence's committed length has moved; there is a prefix cache."""
        assert self.reuse is not None
        # Nearly always its next block is not full yet.
        end = (sequence.num_published_blocks + 1) * self.block_size
        if sequence.num_cached_tokens >= end or sequence.finish_reason is FinishReason.ERROR:
            self.reuse.publish(sequence, self.blocks, self._let_go_of_block)

    def _let_go_of_block(self, sequence: Sequence, block: int) -> None:
        self._deferred.defer(sequence, None, [block])

    def _chunk(self, sequence: Sequence, budget: int) -> SequenceMetadata:
        context = sequence.num_launched_tokens
        remaining = sequence.prefill_target - context
        length = min(remaining, budget, self._max_chunk_tokens)
        for pause in sequence.window_stops:
            if pause > context:
                length = min(length, pause - context)
        assert sequence.slot is not None  # a running sequence has one
        samples = length == remaining
        is_known = samples and sequence.prefill_target < len(sequence.token_ids)
        return SequenceMetadata(
            sequence=sequence,
            generation=sequence.generation,
            slot=sequence.slot,
            context_len=context,
            query_len=length,
            samples=samples,
            scores_prompt=sequence.scores_prompt,
            saves_window=context + length in sequence.window_stops,
            known_token=sequence.token_ids[sequence.prefill_target] if is_known else -1,
        )

    def _schedule_decode(self) -> tuple[list[SequenceMetadata], list[Sequence]]:
        candidates = [sequence for sequence in self.running if sequence.decodes_next]
        self._num_promised = 0
        plain = self._plain_decode(candidates)
        if plain is not None:
            return plain, []
        chosen: list[SequenceMetadata] = []
        starved: list[Sequence] = []
        budget, self._num_promised = self._max_num_tokens, 0
        drafts, reuse, num_behind = self._max_drafts, self.reuse, len(candidates)
        for sequence in candidates:
            if budget == 0:
                break
            num_behind -= 1
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            context = sequence.num_cached_tokens + sequence.total_inflight_tokens
            room = len(sequence.blocks) * self.block_size - context
            num_rows = self._rows_wanted(sequence, room, budget, num_behind) if drafts else 1
            granted = num_rows if num_rows <= room else self._grow(sequence, num_rows)
            if granted is Growth.NEVER:
                starved.append(sequence)
            elif granted is not Growth.LATER:
                assert sequence.slot is not None  # a running sequence has one
                saves = reuse is not None and reuse.saves_window(sequence, context + granted)
                chosen.append(
                    SequenceMetadata(
                        sequence,
                        sequence.generation,
                        sequence.slot,
                        context,
                        granted,
                        True,  # samples
                        False,  # scores_prompt
                        saves,
                    )
                )
                budget -= granted
        return chosen, starved

    def _plain_decode(self, candidates: list[Sequence]) -> list[SequenceMetadata] | None:
        """A row of each of them, put together column by column, which costs the host less.

        None: some have drafts or windows to save, not all fit into a step, or one lacks memory.
        Those that were given blocks meanwhile keep them.
        """
        has_windows = self.reuse is not None and self.reuse.tier is not None
        if self._max_drafts or has_windows or len(candidates) > self._max_num_tokens:
            return None
        contexts = [each.num_cached_tokens + each.total_inflight_tokens for each in candidates]
        num_blocks, size = [len(each.blocks) for each in candidates], self.block_size
        num_preemptions = self.num_preemptions
        for sequence, context, held in zip(candidates, contexts, num_blocks, strict=True):
            if context < held * size:
                continue  # nearly always
            if self._grow(sequence, 1) != 1 or self.num_preemptions > num_preemptions:
                return None
        count = len(candidates)
        return list(
            map(
                SequenceMetadata,
                candidates,
                [each.generation for each in candidates],
                cast(list[int], [each.slot for each in candidates]),  # running ones have slots
                contexts,
                itertools.repeat(1, count),
                itertools.repeat(True, count),  # samples
                itertools.repeat(False, count),  # scores_prompt
            )
        )

    def _useful_rows(self, sequence: Sequence) -> int:
        """A token and its drafts, but no position whose token could only be beyond the end."""
        return min(1 + self._max_drafts, sequence.max_len - sequence.least_len)

    def _rows_wanted(self, sequence: Sequence, room: int, budget: int, num_behind: int) -> int:
        """Rows of a sequence in a decode step; at least 1.

        Those it can use, as far as everybody gets an equal part of the step. Where drafts may be
        left out, those that leave a block to each of the sequences behind.

        Args:
            sequence: one that decodes.
            room: rows that fit into its blocks.
            budget: rows that the step has left.
            num_behind: sequences that come after it.
        """
        num_rows = min(self._useful_rows(sequence), max(1, budget // (num_behind + 1)))
        if num_rows <= room or not self._shrinks_drafts:
            return num_rows  # nearly always
        num_spare = max(0, self.blocks.num_free - num_behind)
        if self._missing_blocks(sequence, num_rows) <= num_spare:
            return num_rows
        return max(1, min(num_rows, room + num_spare * self.block_size))

    def _missing_blocks(self, sequence: Sequence, num_rows: int) -> int:
        # No position from max_len - 1 on is ever computed, whatever the upper bound says.
        stop = min(sequence.num_launched_tokens + num_rows, sequence.max_len - 1)
        return max(0, blocks_for(stop, self.block_size) - len(sequence.blocks))

    def _grow(self, sequence: Sequence, num_rows: int) -> int | Growth:
        """Room for the next positions of a sequence; preempts from the end.

        Returns:
            Rows it may have (fewer than asked for when it alone fills the cache), LATER, or
            NEVER: it alone is too large.
        """
        while (missing := self._missing_blocks(sequence, num_rows)) > 0:
            at_once = min(missing, self.blocks.num_free)
            sequence.add_blocks(self.blocks.allocate(at_once))
            missing -= at_once
            if missing == 0:
                break
            if self._deferred.num_blocks - self._num_promised >= missing:
                self._num_promised += missing
                return Growth.LATER
            if self._is_saving:
                return Growth.LATER  # a copy ends soon, and may hold the last of somebody's blocks
            # Those already chosen stand before it in the order and keep their memory.
            victim = self.running[-1]
            if victim is not sequence:
                self.preempt(victim)
            elif sequence.total_inflight_tokens > 0 or self._deferred.num_blocks > 0:
                return Growth.LATER
            elif len(self.running) > 1:
                self.preempt(sequence)
                return Growth.LATER
            else:
                room = len(sequence.blocks) * self.block_size - sequence.num_launched_tokens
                return min(room, num_rows) if room > 0 else Growth.NEVER
        return num_rows

    def _num_owed(self) -> int:
        """Blocks that running sequences lack for their next step; newcomers leave them these."""
        decoding = (sequence for sequence in self.running if sequence.decodes_next)
        return sum(self._missing_blocks(s, self._useful_rows(s)) for s in decoding)

    def preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence and queue it again; its tokens stay."""
        _log.info(
            "preempting %s[%d] at %d tokens", sequence.request.request_id, sequence.index,
            len(sequence.token_ids),
        )  # fmt: skip
        self.num_preemptions += 1
        sequence.generation += 1
        self._release(sequence)
        self.add(sequence)

    def take_back(self, scheduled: SchedulerOutputs) -> bool:
        """Undo a step that could not be launched for want of device memory.

        Its sequences are preempted, all of them, as nobody knows what the device has done of it;
        from now on steps have half its rows. To be called with nothing issued that still runs.

        Returns:
            Whether smaller steps are left to try; False: it had one row.
        """
        for metadata in reversed(scheduled.sequences):
            if metadata.is_current and metadata.sequence.status is SequenceStatus.RUNNING:
                self.preempt(metadata.sequence)
        self._deferred.collected(scheduled.step)
        if scheduled.num_rows == 1:
            return False
        self._max_num_tokens = scheduled.num_rows // 2
        _log.warning(
            "no device memory for a step of %d rows; steps have at most %d from now on",
            scheduled.num_rows, self._max_num_tokens,
        )  # fmt: skip
        return True

    def finish(self, sequence: Sequence) -> None:
        """Take an ended sequence out, wherever it stands; late results of it are ignored."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self._release(sequence)
        sequence.generation += 1
        sequence.status = SequenceStatus.FINISHED

    def keep_window(self, sequence: Sequence, stop: int, state: HostState) -> None:
        """Hear that the windows of a sequence before a position were saved."""
        if self.reuse is not None:
            self.reuse.keep_window(sequence, stop, state)

    def collected(self, step: int) -> None:
        """Hear that a step's results are on the host; frees the memory that waited for it."""
        self._deferred.collected(step)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        assert sequence.slot is not None  # a running sequence has one
        slot, blocks = sequence.slot, sequence.blocks
        for load in sequence.loads:
            load.synchronize()  # the copy stream writes this memory
        sequence.lose_memory()
        self._deferred.defer(sequence, slot, blocks)

    def _give_back(self, slot: int | None, blocks: list[int]) -> None:
        self._on_release(slot, self.blocks.release(blocks))
        if slot is not None:
            self.slots.release(slot)
