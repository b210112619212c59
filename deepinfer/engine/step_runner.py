"""What the engine runs steps on: the worker of a device, or a scripted double of one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.sampling_batch import SamplingBatch
from deepinfer.engine.state_copies import StateCopies
from deepinfer.engine.step_state import SamplerOutput, SchedulerOutputs, WorkerStepState

PreSamplerSync = Callable[[], SamplingBatch]
"""Called by a runner between forward and sampling of a step: the host finishes older steps while
the device computes, and then says how this step is to be sampled."""


class StepRunner(Protocol):
    """One rank's device side. Calls return before the device has done the work."""

    @property
    def num_blocks(self) -> int:
        """KV blocks there are."""
        ...

    @property
    def max_drafts(self) -> int:
        """Drafts it can verify with each token in a decode step."""
        ...

    @property
    def copies(self) -> StateCopies:
        """Copies of blocks and windows between it and host memory."""
        ...

    def launch(
        self,
        scheduled: SchedulerOutputs,
        built: BuiltStep,
        pre_sampler_sync: PreSamplerSync,
        *,
        timed: bool = False,
    ) -> WorkerStepState:
        """Issue a step's forward, call `pre_sampler_sync` once, issue the sampling.

        Args:
            scheduled: what runs, kept in the state.
            built: host tensors; not changed by the caller until the step is collected.
            pre_sampler_sync: gives the sampling controls of the rows that sample.
            timed: whether the state tells when forward and sampling began and ended.
        Raises:
            DeviceMemoryError: the device has no memory for the step; a part may have been issued.
        """
        ...

    def collect(self, state: WorkerStepState) -> SamplerOutput:
        """Wait for a step's results; raises what its work raised."""
        ...

    def start_penalties(self, slot: int, prompt: list[int], output: list[int]) -> None:
        """Set the token counts of a slot to those of the sequence that just got it."""
        ...

    def release(self, slot: int | None, blocks: Collection[int]) -> None:
        """Hear that nobody reads these blocks any more, nor the slot unless it is None.

        Test modes poison them.
        """
        ...

    def drain(self) -> None:
        """Wait for everything issued, also for a step whose launch failed half-way."""
        ...

    def close(self) -> None:
        """Drain the device and end its threads."""
        ...
