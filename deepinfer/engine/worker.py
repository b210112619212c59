"""One device's worker: launches steps on the compute stream and hands back their state.

Everything a launch issues goes through `Stream.enqueue`; the host waits only for the `sampled`
event of a step, when it collects it. A decode step may be launched before the host knows the
results it goes on from: they stay on the device in a ring (`remap.py`), and the step's inputs are
corrected from it before the forward (ZO-5). What a step computes is in `step_program.py`; decode
steps are replayed as graphs where the backend says so (`step_graphs.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch

from deepinfer.config import EngineConfig
from deepinfer.device.backend import DECODE_GRAPHS, Backend
from deepinfer.device.errors import ConfigError
from deepinfer.device.numerics import Determinism
from deepinfer.device.runtime import run_on
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.draft_rounds import DraftModel
from deepinfer.engine.graph_memory import GraphMemory
from deepinfer.engine.kv_sizing import longest_sequence, num_kv_blocks
from deepinfer.engine.memory_plan import MemoryPlan
from deepinfer.engine.remap import ResultRing
from deepinfer.engine.state_copies import DeviceStateCopies, StateCopies, save_windows
from deepinfer.engine.step_graphs import StepGraphs
from deepinfer.engine.step_program import StepModel, StepProgram
from deepinfer.engine.step_run import EagerRun, HostResults, StepRun
from deepinfer.engine.step_runner import PreSamplerSync
from deepinfer.engine.step_state import (
    DeviceWork,
    SamplerOutput,
    SchedulerOutputs,
    WorkerStepState,
)
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.config import V41Config

_log = logging.getLogger(__name__)


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
        max_key_len: int | None = None,
        graph_bytes: int = 0,
    ) -> None:
        """Allocate caches and results, bind the ops of sampling.

        Args:
            backend: device layer.
            model: backbone or a double of it.
            geometry: of the caches.
            config: of the model.
            async_depth: steps whose results may be in flight beside the newest one's.
            speculation: drafter and number of drafts; None decodes token by token.
            max_key_len: replay decode steps as graphs, of sequences of so many tokens at most;
                None issues them op by op.
            graph_bytes: memory reserved for these graphs.
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
        self._program = StepProgram(
            backend,
            model,
            self._caches,
            config,
            num_results=ring.num_rows,
            drafter=None if speculation is None else speculation.drafter,
            max_drafts=self.max_drafts,
        )
        self._graphs: StepGraphs | None = None
        if max_key_len is not None:
            self._graphs = StepGraphs(
                self._program,
                self._runtime,
                GraphMemory(self._runtime, graph_bytes),
                vocab_size=config.vocab_size,
                block_size=geometry.block_size,
                history_len=config.history_len,
                max_key_len=max_key_len,
                max_drafts=self.max_drafts,
            )

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

        Decode steps are replayed as graphs where the backend says that this is faster.

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
        replays = DECODE_GRAPHS in backend.features
        plan = MemoryPlan.of(
            model_config, geometry, backend, max_drafts=max_drafts, replays=replays
        )
        plan.require_room()
        _log.info("%s", plan)
        return cls(
            backend,
            model,
            geometry,
            model_config,
            async_depth=scheduler.async_depth,
            speculation=None if drafter is None else Speculation(drafter, max_drafts),
            max_key_len=longest_sequence(config, model_config) if replays else None,
            graph_bytes=plan.graphs,
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
        run = self._run(built)
        begun = stream.record_event(timed=True) if timed else None
        stream.enqueue(run.forward)
        forwarded = stream.record_event(timed=timed)
        sampling = pre_sampler_sync()
        run.prepare(sampling)
        host = HostResults(built, sampling, self._runtime, self.max_drafts)
        resumed = stream.record_event(timed=True) if timed else None
        stream.enqueue(lambda: run.finish(sampling, host))
        saved = save_windows(scheduled, self.copies)
        sampled = stream.record_event(timed=timed)
        work: tuple[DeviceWork, ...] = ()
        if begun is not None and resumed is not None:
            work = (
                DeviceWork("forward", begun, forwarded),
                DeviceWork("sampling", resumed, sampled),
            )
        return WorkerStepState(scheduled, host.output, forwarded, sampled, saved, work)

    def collect(self, state: WorkerStepState) -> SamplerOutput:
        """Wait for a step's results; raises what its work raised."""
        state.sampled.synchronize()
        return state.sampler_output

    def _run(self, built: BuiltStep) -> StepRun:
        replayed = None if self._graphs is None else self._graphs.run(built)
        return replayed or EagerRun(self._program, built, self._runtime)

    def start_penalties(self, slot: int, prompt: list[int], output: list[int]) -> None:
        """Set the token counts of a slot to those of the sequence that just got it."""
        prompt_ids, output_ids = torch.tensor(prompt), torch.tensor(output, dtype=torch.int64)
        self._runtime.compute_stream.enqueue(
            lambda: self._program.sampler.start_penalties(slot, prompt_ids, output_ids)
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
