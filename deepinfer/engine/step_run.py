"""One step on its way through the compute stream, its work issued piece by piece."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from deepinfer.device.ops.sampling import Logprobs
from deepinfer.device.runtime import Runtime
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.packed_results import num_columns, unpack_results
from deepinfer.engine.sampling_batch import SamplingBatch
from deepinfer.engine.step_program import StepProgram
from deepinfer.engine.step_state import HostLogprobs, SamplerOutput
from deepinfer.engine.step_upload import DeviceStep, StepUpload
from deepinfer.model.forwarded import Forwarded


class HostResults:
    """Pinned memory for the results of a step, and what the engine sees of it."""

    def __init__(
        self, built: BuiltStep, sampling: SamplingBatch, runtime: Runtime, max_drafts: int
    ) -> None:
        """Allocate what a step with such controls will write."""

        def logprobs(count: int, num_top: int) -> HostLogprobs:
            return HostLogprobs(
                runtime.pinned((count,), torch.float32),
                runtime.pinned((count,), torch.int64),
                runtime.pinned((count, num_top), torch.int64),
                runtime.pinned((count, num_top), torch.float32),
            )

        count, num_top = built.num_samples, sampling.num_top
        scored = len(built.prompt_targets)
        self._packed = runtime.pinned((count, num_columns(max_drafts)), torch.int64)
        self.output: SamplerOutput = unpack_results(
            self._packed,
            max_drafts,
            logprobs=None if num_top is None else logprobs(count * (1 + max_drafts), num_top),
            prompt_logprobs=logprobs(scored, built.num_prompt_top) if scored else None,
        )

    def copy(self, results: Tensor) -> None:
        """Issue the copy of packed results; rows after those of the step are padding."""
        count = self._packed.shape[0]
        if count:
            self._packed.copy_(results[:count], non_blocking=True)

    def copy_logprobs(self, logprobs: Logprobs | None) -> None:
        """Issue the copy of the tokens' log probabilities, if there are any."""
        if logprobs is not None and self.output.logprobs is not None:
            _copy_logprobs(logprobs, self.output.logprobs)

    def copy_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Issue the copy of the log probabilities of prompt tokens."""
        assert self.output.prompt_logprobs is not None  # the step scores prompt rows
        _copy_logprobs(logprobs, self.output.prompt_logprobs)


class StepRun(Protocol):
    """A step being issued: `forward`, then `prepare`, then `finish`."""

    def forward(self) -> None:
        """Issue inputs and model; call it inside `Stream.enqueue`."""
        ...

    def prepare(self, sampling: SamplingBatch) -> None:
        """Make ready on the host what `finish` needs with such controls.

        Raises:
            DeviceMemoryError: the device has no memory for it.
        """
        ...

    def finish(self, sampling: SamplingBatch, host: HostResults) -> None:
        """Issue sampling, drafts and the copies to the host; inside `Stream.enqueue`."""
        ...


class EagerRun:
    """A step issued op by op."""

    def __init__(self, program: StepProgram, built: BuiltStep, runtime: Runtime) -> None:
        """Pack the step's inputs."""
        self._program, self._built, self._device = program, built, runtime.device
        self._upload = StepUpload(built, runtime)
        self._held: list[tuple[DeviceStep, Forwarded]] = []

    def forward(self) -> None:
        self._held.append(self._program.forward(self._upload.to(self._device)))

    def prepare(self, sampling: SamplingBatch) -> None:
        pass

    def finish(self, sampling: SamplingBatch, host: HostResults) -> None:
        step, forwarded = self._held.pop()  # so that its memory goes when this is issued
        finish_eagerly(self._program, step, forwarded, self._built, sampling, host)


def finish_eagerly(
    program: StepProgram,
    step: DeviceStep,
    forwarded: Forwarded,
    built: BuiltStep,
    sampling: SamplingBatch,
    host: HostResults,
) -> None:
    """Issue the end of a step op by op.

    Args:
        program: does it.
        step: as its forward left it, without padding requests.
        forwarded: logits of the deciding rows, then of the prompt rows scored.
        built: the step on the host.
        sampling: controls on the host.
        host: receives the results.
    """
    num_scored = len(built.prompt_targets)
    if num_scored:
        logits = forwarded.logits
        scored = program.sampler.score(
            logits[-num_scored:], built.prompt_targets, built.num_prompt_top
        )
        host.copy_prompt_logprobs(scored)
        forwarded = forwarded._replace(logits=logits[:-num_scored])
    controls = sampling.to(step.remap.device)
    finished = program.finish(step, forwarded, controls, drafts=built.drafts)
    host.copy(finished.results)
    host.copy_logprobs(finished.logprobs)


def _copy_logprobs(source: Logprobs, target: HostLogprobs) -> None:
    target.chosen.copy_(source.chosen, non_blocking=True)
    target.rank.copy_(source.rank, non_blocking=True)
    target.top_ids.copy_(source.top_ids, non_blocking=True)
    target.top_values.copy_(source.top_values, non_blocking=True)
