"""One device's worker: launches steps on the compute stream and hands back their state.

Everything a launch issues goes through `Stream.enqueue`; the host waits only for the `sampled`
event of a step, when it collects it. A decode step may be launched before the host knows the
results it goes on from: they stay on the device in a ring (`remap.py`), and the step's inputs are
corrected from it before the forward (ZO-5). With a drafter beside the model, each step ends with
the drafts for the next one (`draft_rounds.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.device.backend import DECODE_GRAPHS, Backend
from deepinfer.device.errors import ConfigError
from deepinfer.device.numerics import Determinism
from deepinfer.device.ops import state
from deepinfer.device.ops.sampling import Logprobs
from deepinfer.device.ops.state import StepInputs, StepResults
from deepinfer.device.runtime import StepKind, run_on
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.draft_rounds import Anchors, DraftRounds
from deepinfer.engine.kv_sizing import longest_sequence, num_kv_blocks
from deepinfer.engine.logit_rows import LogitRows
from deepinfer.engine.memory_plan import MemoryPlan
from deepinfer.engine.remap import ResultRing
from deepinfer.engine.sampler import Sampled, Sampler
from deepinfer.engine.sampling_batch import SamplingBatch
from deepinfer.engine.state_copies import DeviceStateCopies, StateCopies, save_windows
from deepinfer.engine.step_runner import PreSamplerSync
from deepinfer.engine.step_state import (
    DeviceWork,
    HostLogprobs,
    SamplerOutput,
    SchedulerOutputs,
    WorkerStepState,
)
from deepinfer.engine.step_upload import DeviceStep, StepUpload
from deepinfer.model.caches import CacheGeometry, ModelCaches
from deepinfer.model.config import V41Config
from deepinfer.model.decode_graphs import DecodeGraphs
from deepinfer.model.draft_graphs import DraftGraphs, DraftModel
from deepinfer.model.forwarded import Forwarded
from deepinfer.model.step_batch import StepBatch

_log = logging.getLogger(__name__)


class StepModel(Protocol):
    """What the worker runs: the backbone, or a scripted double of it in tests."""

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches: ...

    def step(self, batch: StepBatch, caches: ModelCaches) -> Forwarded: ...


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a worker drafts.

    Attributes:
        drafter: beside the model.
        max_drafts: drafts that a step verifies of a request at most, from 1.
    """

    drafter: DraftModel
    max_drafts: int


class Worker:
    """Model, caches, drafts and sampler of one rank."""

    def __init__(
        self,
        backend: Backend,
        model: StepModel,
        geometry: CacheGeometry,
        config: V41Config,
        *,
        async_depth: int,
        speculation: Speculation | None = None,
    ) -> None:
        """Allocate caches and results, bind the ops of sampling.

        Args:
            backend: device layer.
            model: backbone or a double of it.
            geometry: of the caches.
            config: of the model.
            async_depth: steps whose results may be in flight beside the newest one's.
            speculation: drafter and number of drafts; None decodes token by token.
        Raises:
            CapabilityError: the backend lacks an op of sampling, verification or step correction.
        """
        self._backend = backend
        self._runtime = backend.runtime
        self._model, self._geometry = model, geometry
        self.max_drafts = 0 if speculation is None else speculation.max_drafts
        self._caches = run_on(self._runtime.compute_stream, lambda: model.create_caches(geometry))
        self.copies: StateCopies = DeviceStateCopies(self._caches, self._runtime)
        ring = ResultRing(async_depth + 1, geometry.max_num_seqs)
        self._results = run_on(
            self._runtime.compute_stream,
            lambda: self._create_results(ring.num_rows, config.history_len),
        )
        self._sampler = Sampler(
            backend,
            num_slots=geometry.max_num_seqs,
            vocab_size=config.vocab_size,
            max_drafts=self.max_drafts,
        )
        self._rounds: DraftRounds | None = None
        if speculation is not None:
            drafter = speculation.drafter
            self._rounds = run_on(
                self._runtime.compute_stream,
                lambda: DraftRounds(
                    drafter,
                    self._caches,
                    backend,
                    max_drafts=self.max_drafts,
                    vocab_size=config.vocab_size,
                ),
            )
        ops = backend.ops
        self._correct_inputs = ops[state.correct_inputs]
        self._next_inputs = ops[state.next_inputs]
        self._row_layout = ops[state.row_layout]

    @classmethod
    def for_engine(
        cls,
        config: EngineConfig,
        backend: Backend,
        model: StepModel,
        model_config: V41Config,
        *,
        drafter: DraftModel | None = None,
    ) -> Worker:
        """A worker with the caches that the configuration asks for.

        Decode steps are replayed as graphs where the backend says that this is faster. Inputs are
        corrected before a graph is filled, so a graph never sees what the host guessed.

        Args:
            config: of the engine.
            backend: device layer.
            model: backbone or a double of it, capturing taps if there is a drafter.
            model_config: of the model.
            drafter: drafts for it, if the configuration speculates.
        Raises:
            ConfigError: the caches do not fit into the device's memory, or the drafter drafts
                less than is asked for.
        """
        scheduler = config.scheduler
        max_drafts = 0 if drafter is None else num_drafts(config, model_config)
        geometry = CacheGeometry.for_engine(
            model_config,
            block_size=config.cache.block_size,
            num_blocks=num_kv_blocks(config, model_config, backend),
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_tokens,
            async_depth=scheduler.async_depth,
            max_drafts=max_drafts,
            has_drafter=drafter is not None,
        )
        plan = MemoryPlan.of(model_config, geometry, backend, max_drafts=max_drafts)
        plan.require_room()
        _log.info("%s", plan)
        if DECODE_GRAPHS in backend.features:
            longest = longest_sequence(config, model_config)
            model = DecodeGraphs(model, backend, max_key_len=longest)
            drafter = None if drafter is None else DraftGraphs(drafter, backend)
        return cls(
            backend,
            model,
            geometry,
            model_config,
            async_depth=scheduler.async_depth,
            speculation=None if drafter is None else Speculation(drafter, max_drafts),
        )

    @property
    def num_blocks(self) -> int:
        """KV blocks there are."""
        return self._geometry.num_blocks

    def launch(
        self,
        scheduled: SchedulerOutputs,
        built: BuiltStep,
        pre_sampler_sync: PreSamplerSync,
        *,
        timed: bool = False,
    ) -> WorkerStepState:
        """Issue a step; returns before it is computed.

        Args:
            scheduled: what runs, kept in the state.
            built: host tensors; copied before this returns.
            pre_sampler_sync: called after the forward was issued; gives the sampling controls.
            timed: whether the state tells when forward and sampling began and ended.
        """
        stream = self._runtime.compute_stream
        upload = StepUpload(built, self._runtime)
        held: list[tuple[DeviceStep, Forwarded]] = []

        def forward() -> None:
            step = self._true_step(upload.to(self._runtime.device))
            held.append((step, self._model.step(step.batch, self._caches)))

        begun = stream.record_event(timed=True) if timed else None
        stream.enqueue(forward)
        forwarded = stream.record_event(timed=timed)
        sampling = pre_sampler_sync()
        output = self._allocate(built, sampling)

        def sample() -> None:
            step, forwarded = held.pop()
            self._finish(forwarded, step, built, sampling, output)

        resumed = stream.record_event(timed=True) if timed else None
        stream.enqueue(sample)
        saved = save_windows(scheduled, self.copies)
        sampled = stream.record_event(timed=timed)
        work: tuple[DeviceWork, ...] = ()
        if begun is not None and resumed is not None:
            work = (
                DeviceWork("forward", begun, forwarded),
                DeviceWork("sampling", resumed, sampled),
            )
        return WorkerStepState(scheduled, output, forwarded, sampled, saved, work)

    def collect(self, state: WorkerStepState) -> SamplerOutput:
        """Wait for a step's results; raises what its work raised."""
        state.sampled.synchronize()
        return state.sampler_output

    def start_penalties(self, slot: int, prompt: list[int], output: list[int]) -> None:
        """Set the token counts of a slot to those of the sequence that just got it."""
        prompt_ids, output_ids = torch.tensor(prompt), torch.tensor(output, dtype=torch.int64)
        self._runtime.compute_stream.enqueue(
            lambda: self._sampler.start_penalties(slot, prompt_ids, output_ids)
        )

    def release(self, slot: int | None, blocks: Collection[int]) -> None:
        """Hear that nobody reads these rows any more; test modes poison them at once.

        Not in the order of the compute stream: a launched step that still read them would get
        the poison, which is what the mode is for.
        """
        if not self._runtime.poisons_released:
            return
        numbers = torch.tensor(list(blocks), dtype=torch.int64)

        def poison() -> None:
            self._caches.poison_blocks(numbers.to(self._runtime.device))
            if slot is not None:
                self._caches.poison_slot(slot)

        self._runtime.copy_stream.enqueue(poison)
        self._runtime.copy_stream.synchronize()

    def drain(self) -> None:
        """Wait for everything issued, also for a step whose launch failed half-way."""
        self._runtime.compute_stream.synchronize()

    def close(self) -> None:
        """Drain the device and end its threads."""
        self._backend.close()

    def _allocate(self, built: BuiltStep, sampling: SamplingBatch) -> SamplerOutput:
        pinned = self._runtime.pinned

        def logprobs(count: int, num_top: int) -> HostLogprobs:
            return HostLogprobs(
                pinned((count,), torch.float32),
                pinned((count,), torch.int64),
                pinned((count, num_top), torch.int64),
                pinned((count, num_top), torch.float32),
            )

        count, width = built.num_samples, 1 + self.max_drafts
        scored, num_top = len(built.prompt_targets), sampling.num_top
        return SamplerOutput(
            token_ids=pinned((count, width), torch.int64),
            num_accepted=pinned((count,), torch.int64),
            num_verified=pinned((count,), torch.int64),
            finite=pinned((count, width), torch.bool),
            draft_ids=pinned((count, self.max_drafts), torch.int64),
            survival=pinned((count, self.max_drafts), torch.float32),
            logprobs=None if num_top is None else logprobs(count * width, num_top),
            prompt_logprobs=logprobs(scored, built.num_prompt_top) if scored else None,
        )

    def _create_results(self, num_rows: int, history_len: int) -> StepResults:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self._runtime.device)

        return StepResults(
            token_ids=zeros(num_rows, 1 + self.max_drafts),
            num_accepted=zeros(num_rows),
            context_lens=zeros(num_rows),
            history=zeros(num_rows, history_len),
        )

    def _true_step(self, step: DeviceStep) -> DeviceStep:
        """The step with its inputs corrected by the results it goes on from."""
        if step.batch.kind is not StepKind.DECODE:
            return step  # a prompt is known to the host
        host, rounds = _inputs(step.batch), self._rounds
        if rounds is None:
            draft_ids = step.remap.new_empty((step.remap.shape[0], 0))
        else:
            draft_ids = rounds.draft_ids(step.batch.seq_slots)
            host = host._replace(query_lens=rounds.query_bounds(step, self._results))
        inputs = self._correct_inputs(host, draft_ids, step.limits, step.remap, self._results)
        return replace(step, batch=replace(step.batch, **inputs._asdict()))

    def _finish(
        self,
        forwarded: Forwarded,
        step: DeviceStep,
        built: BuiltStep,
        sampling: SamplingBatch,
        output: SamplerOutput,
    ) -> None:
        """Decide the step's tokens, leave what the next steps go on from, copy to the host."""
        logits, count = forwarded.logits, built.num_samples
        if output.prompt_logprobs is not None:
            prompt_logits = logits[-len(built.prompt_targets) :]
            scored = self._sampler.score(prompt_logits, built.prompt_targets, built.num_prompt_top)
            _copy_logprobs(scored, output.prompt_logprobs)
            logits = logits[: -len(built.prompt_targets)]
        rows = self._logit_rows(step)
        controls = sampling.to(self._runtime.device)
        rounds, drafts = self._rounds, None
        slots = step.batch.seq_slots.index_select(0, step.result_seqs)
        if rounds is not None and step.batch.kind is StepKind.DECODE:
            drafts = rounds.step_drafts(slots, sampling.work)
        if count:
            sampled = self._sampler.sample(logits, rows, controls, drafts)
            anchors = self._keep_results(step, sampled)
            _copy_results(sampled, rows, output)
        else:
            anchors = Anchors(slots, slots)  # nobody
        if rounds is not None:
            num_final = step.batch.query_lens
            if drafts is not None:
                num_final = anchors.positions - step.batch.context_lens
            wanted = controls if built.drafts else None
            rounds.advance(step, forwarded, num_final, anchors, wanted)
            output.draft_ids.copy_(rounds.draft_ids(slots), non_blocking=True)
            output.survival.copy_(rounds.survival(slots), non_blocking=True)

    def _logit_rows(self, step: DeviceStep) -> LogitRows:
        batch = step.batch
        if batch.kind is StepKind.DECODE:
            num_rows = batch.input_ids.shape[0]
            layout = self._row_layout(batch.query_lens, batch.context_lens, num_rows)
            return LogitRows.verifying(layout, batch.max_query_len)
        stops = batch.context_lens + batch.query_lens
        return LogitRows.single(stops.index_select(0, step.result_seqs))

    def _keep_results(self, step: DeviceStep, sampled: Sampled) -> Anchors:
        """Leave what the next steps go on from in the ring."""
        rows, (tokens, accepted) = step.result_rows, sampled.verified
        after = self._next_inputs(
            _inputs(step.batch), step.result_seqs, accepted, kind=step.batch.kind
        )
        self._results.token_ids.index_copy_(0, rows, tokens)
        self._results.num_accepted.index_copy_(0, rows, accepted)
        self._results.context_lens.index_copy_(0, rows, after.context_lens)
        self._results.history.index_copy_(0, rows, after.history)
        newest = tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
        return Anchors(newest, after.context_lens)


def num_drafts(config: EngineConfig, model_config: V41Config) -> int:
    """Drafts of a request in a step, as configured or as many as the drafter gives.

    Raises:
        ConfigError: more than the drafter was trained to give; or so many that a full step could
            not verify all of them, which would make a seeded answer depend on its company.
    """
    size = model_config.dspark_block_size
    wanted = config.speculation.max_drafts or size
    if wanted > size:
        raise ConfigError(
            f"speculation.max_drafts = {wanted}, but the checkpoint's drafter gives {size} drafts "
            f"(dspark_block_size); set it to {size} or less, or leave it out"
        )
    scheduler = config.scheduler
    num_rows = scheduler.max_num_seqs * (1 + wanted)
    if config.determinism is Determinism.DETERMINISTIC and num_rows > scheduler.max_num_tokens:
        raise ConfigError(
            f"determinism = deterministic with {wanted} drafts for {scheduler.max_num_seqs} "
            f"sequences (scheduler.max_num_seqs) needs steps of {num_rows} rows, but "
            f"scheduler.max_num_tokens is {scheduler.max_num_tokens}; raise it, or lower "
            "speculation.max_drafts"
        )
    return wanted


def _inputs(batch: StepBatch) -> StepInputs:
    return StepInputs(batch.input_ids, batch.query_lens, batch.context_lens, batch.history)


def _copy_results(sampled: Sampled, rows: LogitRows, output: SamplerOutput) -> None:
    output.token_ids.copy_(sampled.verified.token_ids, non_blocking=True)
    output.num_accepted.copy_(sampled.verified.num_accepted, non_blocking=True)
    num_verified = (rows.starts.diff() - 1).clamp_min(0)
    output.num_verified.copy_(num_verified, non_blocking=True)
    output.finite.copy_(sampled.finite, non_blocking=True)
    if output.logprobs is not None and sampled.logprobs is not None:
        _copy_logprobs(sampled.logprobs, output.logprobs)


def _copy_logprobs(source: Logprobs, target: HostLogprobs) -> None:
    target.chosen.copy_(source.chosen, non_blocking=True)
    target.rank.copy_(source.rank, non_blocking=True)
    target.top_ids.copy_(source.top_ids, non_blocking=True)
    target.top_values.copy_(source.top_values, non_blocking=True)
