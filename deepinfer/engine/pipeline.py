"""The pipeline of steps: the device computes one while the host prepares the next.

    depth 1      host    | schedule, build, forward N+1 | wait N | commit N | sample N+1 | texts |
                 device  |  ... forward N | sample N | forward N+1 ...          | sample N+1 | ...

A turn (`advance`) schedules a step from what is committed and what is in flight, issues its
forward, and only then, in `pre_sampler_sync`, waits for the step before: the device has work
already. The tokens just committed reach constraints and controls before the new step's sampling
is issued. `async_depth` is how many steps stay uncollected at the end of a turn; 0 is the plain
loop in the same code.

States of a step, all moved here:

    state        left by                     what the host knows      what it may touch
    SCHEDULED    runner.launch: forward      bounds of its lengths    lists of the scheduler
    FORWARDED    runner.launch: sampling     the same                 nothing the device reads
    LAUNCHED     runner.collect (waits)      the same                 nothing the device reads
    COLLECTED    commit                      its results              memory last used by it
    COMMITTED    -                           tokens, lengths, text    everything of it

- Results are applied in the order of launches, by `commit` alone, to sequences of the generation
  that was scheduled; a sequence that ended or was preempted since ignores them (ZO-8).
- A sequence may end in step N while N+1 runs with it. Its row in N+1 computes something nobody
  takes; its memory waits in `DeferredRelease` until N+1 is collected (ZO-7).
- No device memory for a step (`DeviceMemoryError` while it is issued): older steps are finished,
  its sequences are preempted, and later steps have half its rows. A single row that does not fit
  ends its request.
- Nothing to schedule: the oldest step in flight is collected instead. Nobody left: `flush`
  collects them all, so that no memory and no result stays behind (ZO-9).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from deepinfer.device.errors import DeviceMemoryError
from deepinfer.device.runtime import StepKind
from deepinfer.engine.batch_builder import BatchBuilder
from deepinfer.engine.commit import StopRules, commit
from deepinfer.engine.draft_budgets import DraftBudgets
from deepinfer.engine.outputs import FinishReason
from deepinfer.engine.remap import Remap, ResultRing
from deepinfer.engine.sampling_batch import SamplingBatch
from deepinfer.engine.sampling_builder import SamplingBuilder
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Request, Sequence, SequenceStatus
from deepinfer.engine.step_runner import StepRunner
from deepinfer.engine.step_state import SamplerOutput, SchedulerOutputs, WorkerStepState
from deepinfer.engine.timeline import Phase, Timeline
from deepinfer.model.config import V41Config


@dataclass(frozen=True, slots=True)
class PipelineEvents:
    """Calls back into the engine, in the order in which things happen.

    Attributes:
        on_change: requests that want to hear of every token have news.
        on_end: a sequence has ended by its own tokens; its finish reason is set.
        on_starved: a sequence needs more KV than there is.
        on_no_memory: the device has no memory for a row of a sequence; with its reason.
    """

    on_change: Callable[[list[Request]], None]
    on_end: Callable[[Sequence], None]
    on_starved: Callable[[Sequence], None]
    on_no_memory: Callable[[Sequence, str], None]


class StepPipeline:
    """Steps of one rank from the scheduler through the runner to `commit`."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        model_config: V41Config,
        rules: StopRules,
        events: PipelineEvents,
        timeline: Timeline,
        *,
        async_depth: int,
        budgets: DraftBudgets | None = None,
    ) -> None:
        """A pipeline with nothing in flight.

        Args:
            runner: where steps are launched.
            scheduler: decides the steps.
            model_config: the model.
            rules: what ends an answer.
            events: who hears of ends.
            timeline: is told what host and device do.
            async_depth: steps that stay uncollected at the end of a turn.
            budgets: chooses how many drafts a step verifies and hears what came of it; None:
                there are no drafts.
        """
        self._budgets = budgets
        self._runner, self._scheduler = runner, scheduler
        self._rules, self._events = rules, events
        self._timeline, self._depth = timeline, async_depth
        self._sampling = SamplingBuilder(model_config.vocab_size, rules)
        self._ring = ResultRing(async_depth + 1, scheduler.slots.num_slots)
        self._builder = BatchBuilder(model_config, self._ring)
        self._inflight: deque[WorkerStepState] = deque()
        self.num_steps = self.num_generated_tokens = 0

    @property
    def num_inflight(self) -> int:
        """Steps launched and not collected."""
        return len(self._inflight)

    def advance(self) -> None:
        """One turn: launch a step if one can run, finish the steps above the depth."""
        num_preemptions = self._scheduler.num_preemptions
        with self._timeline.phase(Phase.SCHEDULE):
            scheduled, starved = self._scheduler.schedule()
        if self._scheduler.num_preemptions > num_preemptions:
            self._timeline.mark(f"preempted {self._scheduler.num_preemptions - num_preemptions}")
        for sequence in starved:
            self._events.on_starved(sequence)
        if scheduled.kind is not StepKind.EMPTY:
            self._launch_or_take_back(scheduled)
        elif self._inflight:
            # What could run next depends on results that are still out.
            self._finish_oldest()
        else:
            self._scheduler.drain()  # or on memory that copies to the host hold
        while len(self._inflight) > self._depth:
            self._finish_oldest()
        if not self._scheduler.has_work:
            self.flush()

    def flush(self) -> None:
        """Finish every step in flight (ZO-9)."""
        if self._inflight:
            self._timeline.mark("flush")
        while self._inflight:
            self._finish_oldest()
        self._scheduler.drain()
        self._timeline.drained()

    def _launch_or_take_back(self, scheduled: SchedulerOutputs) -> None:
        reason: str | None = None
        try:
            self._launch(scheduled)
        except DeviceMemoryError as error:
            reason = str(error)
        # Outside of the handler: what the failed work made is freed with its traceback.
        if reason is not None:
            self._take_back(scheduled, reason)

    def _take_back(self, scheduled: SchedulerOutputs, reason: str) -> None:
        """Go on without a step the device had no memory for; its sequences are computed anew."""
        self._timeline.mark("no device memory")
        self.flush()
        self._runner.drain()  # what was issued of it reads the memory that is now released
        if not self._scheduler.take_back(scheduled):
            (metadata,) = scheduled.sequences
            if metadata.sequence.status is SequenceStatus.WAITING:
                self._events.on_no_memory(metadata.sequence, reason)

    def _launch(self, scheduled: SchedulerOutputs) -> None:
        if self._budgets is not None:
            with self._timeline.phase(Phase.SCHEDULE, scheduled.step):
                scheduled = replace(scheduled, draft_budget=self._budgets.choose(scheduled))
        step, inflight = scheduled.step, (state.scheduled for state in self._inflight)
        with self._timeline.phase(Phase.BUILD, step):
            if scheduled.kind is StepKind.PREFILL:
                self._start_newcomers(scheduled)
            remap = Remap.between(inflight, scheduled, self._ring)
            built = self._builder.build(scheduled, remap)
        with self._timeline.phase(Phase.LAUNCH, step):
            state = self._runner.launch(
                scheduled,
                built,
                lambda: self._pre_sampler_sync(scheduled),
                timed=self._timeline.is_recording,
            )
        self._inflight.append(state)

    def _start_newcomers(self, scheduled: SchedulerOutputs) -> None:
        for metadata in scheduled.sequences:
            if metadata.context_len == metadata.sequence.rows.first:
                self._start_on_device(metadata.sequence, metadata.slot)
            for load in metadata.sequence.loads:
                self._runner.copies.wait_before_next_step(load)
            metadata.sequence.loads.clear()

    def _start_on_device(self, sequence: Sequence, slot: int) -> None:
        if sequence.request.params.has_penalties:
            prompt = sequence.request.prompt_token_ids
            # A known token is counted when its row yields it.
            before = sequence.token_ids[len(prompt) : sequence.prefill_target]
            self._runner.start_penalties(slot, prompt, before)

    def _pre_sampler_sync(self, scheduled: SchedulerOutputs) -> SamplingBatch:
        """Finish older steps while the new step's forward runs; then its sampling controls.

        A constrained row's mask follows from the token before it, so that step is awaited too.
        """
        while self._inflight and (len(self._inflight) >= self._depth or _awaits_tokens(scheduled)):
            self._finish_oldest()
        with self._timeline.phase(Phase.CONTROLS, scheduled.step):
            return self._sampling.build(scheduled)

    def _finish_oldest(self) -> None:
        state = self._inflight[0]
        with self._timeline.phase(Phase.WAIT, state.scheduled.step):
            output = self._collect(state)
        # Only now: an interrupted wait leaves the step to be collected.
        self._inflight.popleft()
        self._timeline.collected(state)
        with self._timeline.phase(Phase.COMMIT, state.scheduled.step):
            self._scheduler.collected(state.scheduled.step)
            windows = [(m, saved) for m, saved in state.saved_windows if m.is_current]
            if self._budgets is not None:
                # Before the commit: a sequence that ends with this step was verified, too.
                self._budgets.committed(
                    state.scheduled,
                    output.num_verified.numpy(),
                    output.num_accepted.numpy(),
                    output.survival.numpy(),
                )
            publish = None if self._scheduler.reuse is None else self._scheduler.publish
            committed = commit(state, output, self._rules, publish)
            self.num_steps += 1
            self.num_generated_tokens += committed.num_tokens
            for metadata, saved in windows:
                if metadata.sequence.finish_reason is not FinishReason.ERROR:
                    self._scheduler.keep_window(metadata.sequence, metadata.stop, saved)
            self._events.on_change(committed.changed)
            for sequence in committed.ended:
                self._events.on_end(sequence)

    def _collect(self, state: WorkerStepState) -> SamplerOutput:
        if self._budgets is None:
            return self._runner.collect(state)
        return self._budgets.wait(lambda: self._runner.collect(state))


def _awaits_tokens(scheduled: SchedulerOutputs) -> bool:
    """Whether a row's mask waits for a token that an earlier step in flight yields."""
    return any(
        metadata.samples
        and metadata.is_current
        and metadata.sequence.constraint is not None
        and metadata.sequence.num_inflight_samples > 1
        for metadata in scheduled.sequences
    )
