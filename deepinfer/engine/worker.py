"""One device's worker: launches steps on the compute stream and hands back their state.

Everything a launch issues goes through `Stream.enqueue`; the host waits only for the `sampled`
event of a step, when it collects it. A decode step may be launched before the host knows the
results it goes on from: they stay on the device in a ring (`remap.py`), and the step's inputs are
corrected from it before the forward (ZO-5).
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
from deepinfer.device.ops import sampling, state
from deepinfer.device.ops.sampling import LogitControls, Logprobs
from deepinfer.device.ops.state import StepInputs, StepResults
from deepinfer.device.runtime import StepKind, run_on
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.kv_sizing import longest_sequence, num_kv_blocks
from deepinfer.engine.memory_plan import MemoryPlan
from deepinfer.engine.remap import ResultRing
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
from deepinfer.model.step_batch import StepBatch

_log = logging.getLogger(__name__)


class StepModel(Protocol):
    """What the worker runs: the backbone, or a scripted double of it in tests."""

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches: ...

    def forward(self, batch: StepBatch, caches: ModelCaches) -> Tensor: ...


@dataclass(slots=True)
class _PenaltyState:
    """Token counts per slot, made when the first penalised request arrives."""

    output_counts: Tensor
    prompt_seen: Tensor


class Worker:
    """Model, caches and sampler of one rank."""

    max_drafts = 0

    def __init__(
        self,
        backend: Backend,
        model: StepModel,
        geometry: CacheGeometry,
        config: V41Config,
        *,
        async_depth: int,
    ) -> None:
        """Allocate caches and results, bind the sampling ops.

        Args:
            backend: device layer.
            model: backbone or a double of it.
            geometry: of the caches.
            config: of the model.
            async_depth: steps whose results may be in flight beside the newest one's.
        Raises:
            CapabilityError: the backend lacks an op of sampling or step correction.
        """
        self._backend = backend
        self._runtime = backend.runtime
        self._model, self._geometry, self._vocab_size = model, geometry, config.vocab_size
        self._caches = run_on(self._runtime.compute_stream, lambda: model.create_caches(geometry))
        self._penalties: _PenaltyState | None = None
        self.copies: StateCopies = DeviceStateCopies(self._caches, self._runtime)
        ring = ResultRing(async_depth + 1, geometry.max_num_seqs)
        self._results = run_on(
            self._runtime.compute_stream,
            lambda: self._create_results(ring.num_rows, config.history_len),
        )
        ops = backend.ops
        self._apply_controls = ops[sampling.apply_controls]
        self._sample_tokens = ops[sampling.sample_tokens]
        self._token_logprobs = ops[sampling.token_logprobs]
        self._finite_rows = ops[sampling.finite_rows]
        self._count_tokens = ops[sampling.count_tokens]
        self._correct_inputs = ops[state.correct_inputs]
        self._next_inputs = ops[state.next_inputs]

    @classmethod
    def for_engine(
        cls, config: EngineConfig, backend: Backend, model: StepModel, model_config: V41Config
    ) -> Worker:
        """A worker with the caches that the configuration asks for.

        Decode steps are replayed as graphs where the backend says that this is faster. Inputs are
        corrected before a graph is filled, so a graph never sees what the host guessed.

        Raises:
            ConfigError: the caches do not fit into the device's memory.
        """
        scheduler = config.scheduler
        geometry = CacheGeometry.for_engine(
            model_config,
            block_size=config.cache.block_size,
            num_blocks=num_kv_blocks(config, model_config, backend),
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_tokens,
            async_depth=scheduler.async_depth,
        )
        plan = MemoryPlan.of(model_config, geometry, backend)
        plan.require_room()
        _log.info("%s", plan)
        if DECODE_GRAPHS in backend.features:
            longest = longest_sequence(config, model_config)
            model = DecodeGraphs(model, backend, max_key_len=longest)
        return cls(backend, model, geometry, model_config, async_depth=scheduler.async_depth)

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
        held: list[tuple[DeviceStep, Tensor]] = []

        def forward() -> None:
            step = self._true_step(upload.to(self._runtime.device))
            held.append((step, self._model.forward(step.batch, self._caches)))

        begun = stream.record_event(timed=True) if timed else None
        stream.enqueue(forward)
        forwarded = stream.record_event(timed=timed)
        sampling = pre_sampler_sync()
        output = self._allocate(built, sampling)

        def sample() -> None:
            step, logits = held.pop()
            self._sample(logits, step, built, sampling, output)

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
        device = self._runtime.device
        prompt_ids, output_ids = torch.tensor(prompt), torch.tensor(output, dtype=torch.int64)

        def reset() -> None:
            if self._penalties is None:
                shape = (self._geometry.max_num_seqs, self._vocab_size)
                self._penalties = _PenaltyState(
                    torch.zeros(shape, dtype=torch.int32, device=device),
                    torch.zeros(shape, dtype=torch.bool, device=device),
                )
            counts, seen = self._penalties.output_counts, self._penalties.prompt_seen
            counts[slot] = 0
            seen[slot] = False
            seen[slot, prompt_ids.to(device)] = True
            ids = output_ids.to(device)
            self._count_tokens(ids, torch.full_like(ids, slot), counts)

        self._runtime.compute_stream.enqueue(reset)

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

        count, num_top = built.num_samples, sampling.num_top
        scored = len(built.prompt_targets)
        return SamplerOutput(
            token_ids=pinned((count, 1), torch.int64),
            num_accepted=torch.zeros(count, dtype=torch.int64),
            finite=pinned((count,), torch.bool),
            logprobs=None if num_top is None else logprobs(count, num_top),
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
        drafts = step.remap.new_empty((step.remap.shape[0], self.max_drafts))
        inputs = self._correct_inputs(
            _inputs(step.batch), drafts, step.limits, step.remap, self._results
        )
        return replace(step, batch=replace(step.batch, **inputs._asdict()))

    def _keep_results(self, step: DeviceStep, tokens: Tensor) -> None:
        """Leave what the next steps go on from in the ring; tokens [N] have no drafts before."""
        rows, accepted = step.result_rows, torch.zeros_like(tokens)
        after = self._next_inputs(
            _inputs(step.batch), step.result_seqs, accepted, kind=step.batch.kind
        )
        self._results.token_ids.index_copy_(0, rows, tokens.unsqueeze(1))
        self._results.num_accepted.index_copy_(0, rows, accepted)
        self._results.context_lens.index_copy_(0, rows, after.context_lens)
        self._results.history.index_copy_(0, rows, after.history)

    def _sample(
        self,
        logits: Tensor,
        step: DeviceStep,
        built: BuiltStep,
        sampling: SamplingBatch,
        output: SamplerOutput,
    ) -> None:
        device = self._runtime.device
        count = built.num_samples
        if output.prompt_logprobs is not None:
            targets = torch.tensor(built.prompt_targets, device=device)
            scored = self._token_logprobs(logits[count:], targets, built.num_prompt_top)
            _copy_logprobs(scored, output.prompt_logprobs)
        if count == 0:
            return
        raw = logits[:count]
        controls = sampling.to(device)
        processed = self._apply_controls(raw, self._controls(controls))
        tokens = self._sample_tokens(processed, controls.params, controls.work)
        self._keep_results(step, tokens)
        output.token_ids[:, 0].copy_(tokens, non_blocking=True)
        usable = self._finite_rows(raw) & self._finite_rows(processed)
        output.finite.copy_(usable, non_blocking=True)
        if output.logprobs is not None:
            chosen = self._token_logprobs(raw, tokens, sampling.num_top or 0)
            _copy_logprobs(chosen, output.logprobs)
        if sampling.has_penalties and self._penalties is not None:
            self._count_tokens(tokens, controls.integers[4], self._penalties.output_counts)

    def _controls(self, controls: SamplingBatch) -> LogitControls:
        if self._penalties is None:
            # No penalised request has ever run, so no row of this step is penalised.
            return LogitControls(controls.allowed, controls.banned, controls.bias, None)
        return controls.controls(self._penalties.output_counts, self._penalties.prompt_seen)


def _inputs(batch: StepBatch) -> StepInputs:
    return StepInputs(batch.input_ids, batch.query_lens, batch.context_lens, batch.history)


def _copy_logprobs(source: Logprobs, target: HostLogprobs) -> None:
    target.chosen.copy_(source.chosen, non_blocking=True)
    target.rank.copy_(source.rank, non_blocking=True)
    target.top_ids.copy_(source.top_ids, non_blocking=True)
    target.top_values.copy_(source.top_values, non_blocking=True)
