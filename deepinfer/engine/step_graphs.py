"""Decode steps as captured graphs: a copy, a graph, the host's say, a graph, a copy.

    copy     the step's integers, laid out for its tier, to the memory that the graphs read
    graph 1  inputs corrected by the results in flight, and the model
    host     older steps are finished, sampling controls built (`pre_sampler_sync`)
    graph 2  sampling or verification, results kept in the ring, context injected, drafts made
    copy     the results to the host

Issued op by op, a decode step is hundreds of short launches whose issuing costs the host more than
running them costs the device. There is a pair of graphs for each tier (`step_tiers.py`), the
second for each kind of sampling work. Steps with masks, biases, penalties, early bans or log
probabilities replay the first graph and issue the rest op by op; prompts are issued op by op.

Graphs are captured on the host's time, with a step of padding requests only: sampling twice what
is to be sampled once would verify the wrong drafts. All graphs are replayed one after the other,
a pair without another step between, so they may share the memory of what lives inside them; what
the second reads of the first, logits above all, is kept for each tier. The memory plan reserves
memory for that (`graph_memory.py`); when it is used up, steps of further tiers, or the ends of
steps with further kinds of work, are issued op by op.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.device.ops.sampling import SampleWork
from deepinfer.device.runtime import Graph, Runtime, StepKind
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.graph_memory import GraphMemory
from deepinfer.engine.sampling_batch import PACKED_ROWS, SamplingBatch
from deepinfer.engine.step_program import Finished, StepProgram
from deepinfer.engine.step_run import HostResults, finish_eagerly
from deepinfer.engine.step_tiers import Tier, tier_of
from deepinfer.engine.step_upload import DeviceStep, TierLayout
from deepinfer.model.forwarded import Forwarded

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class _FinishGraph:
    """The second graph, for one kind of work.

    Attributes:
        graph: the graph.
        found: one entry, what the newest run of the captured Python code left: on a device that of
            the capture, which replays write into; on a CPU, whose replays run the code, the last.
    """

    graph: Graph
    found: list[Finished]


@dataclass(slots=True)
class _TierGraphs:
    """Graphs of one tier and the memory they read.

    Attributes:
        layout: of `inputs`.
        inputs: packed integers of the step.
        controls: packed parameters of a plain batch.
        controls_of: the batch that `controls` holds, in the order of the compute stream.
        forward: the first graph.
        found: one entry, what it leaves, as in `_FinishGraph`.
        finish: the second graph by the work of its rows.
    """

    layout: TierLayout
    inputs: Tensor
    controls: Tensor
    forward: Graph
    found: list[tuple[DeviceStep, Forwarded]]
    controls_of: SamplingBatch | None = None
    finish: dict[SampleWork, _FinishGraph] = field(default_factory=dict)


class StepGraphs:
    """The graphs of a worker; captured when a step first needs them."""

    def __init__(
        self,
        program: StepProgram,
        runtime: Runtime,
        memory: GraphMemory,
        *,
        vocab_size: int,
        block_size: int,
        history_len: int,
        max_key_len: int,
        max_drafts: int,
    ) -> None:
        """No graphs yet.

        Args:
            program: what is captured.
            runtime: runs it.
            memory: captures it.
            vocab_size: logits of a row.
            block_size: tokens of a cache block.
            history_len: tokens before a request that the model looks at.
            max_key_len: longest sequence in tokens.
            max_drafts: most drafts of a request.
        """
        self._program, self._runtime, self._memory = program, runtime, memory
        self._vocab_size = vocab_size
        self._block_size, self._history_len = block_size, history_len
        self._max_key_len, self._max_drafts = max_key_len, max_drafts
        self._tiers: dict[Tier, _TierGraphs] = {}

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._tiers) + sum(len(tier.finish) for tier in self._tiers.values())

    def run(self, built: BuiltStep) -> ReplayedRun | None:
        """A run of a step by its tier's graphs; None if such a step is not replayed.

        Nor is one for whose graph no memory is left.

        Raises:
            DeviceMemoryError: the device has no memory for a graph of the tier.
        """
        if built.batch.kind is not StepKind.DECODE:
            return None
        tier = tier_of(built, max_key_len=self._max_key_len, max_drafts=self._max_drafts)
        if tier not in self._tiers:
            captured = self._capture(tier)
            if captured is None:
                return None
            self._tiers[tier] = captured
        return ReplayedRun(self._program, self._tiers[tier], built, self._runtime, self._memory)

    def _capture(self, tier: Tier) -> _TierGraphs | None:
        program, runtime = self._program, self._runtime
        name, logits = f"decode steps, {tier}", tier.num_rows * self._vocab_size
        if not self._memory.has_room(name, logits * _FP32_BYTES):
            return None
        layout = TierLayout(
            tier,
            block_size=self._block_size,
            history_len=self._history_len,
            spare_result=program.spare_result,
            spare_slot=program.spare_slot,
        )
        inputs = _on_device(layout.padding, runtime)
        controls = torch.zeros((PACKED_ROWS, tier.num_seqs), dtype=torch.int64)
        step = layout.step(inputs)
        found: list[tuple[DeviceStep, Forwarded]] = []

        def work() -> None:
            found[:] = [program.forward(step)]

        graph = self._memory.capture(name, work)
        return _TierGraphs(layout, inputs, _on_device(controls, runtime), graph, found)


class ReplayedRun:
    """A decode step issued as graphs."""

    def __init__(
        self,
        program: StepProgram,
        tier: _TierGraphs,
        built: BuiltStep,
        runtime: Runtime,
        memory: GraphMemory,
    ) -> None:
        """Pack the step's inputs as the tier wants them."""
        self._program, self._tier, self._built = program, tier, built
        self._runtime, self._memory = runtime, memory
        self._upload = tier.layout.pack(built, runtime)

    def forward(self) -> None:
        self._tier.inputs.copy_(self._upload, non_blocking=True)
        self._tier.forward.replay()

    def prepare(self, sampling: SamplingBatch) -> None:
        if not sampling.is_plain or sampling.work in self._tier.finish:
            return
        if not self._memory.has_room(self._name(sampling), 0):
            return
        stream = self._runtime.compute_stream
        stream.enqueue(self._forward_of_padding)
        self._tier.finish[sampling.work] = self._capture(sampling)
        stream.enqueue(self.forward)  # writes what it wrote before

    def finish(self, sampling: SamplingBatch, host: HostResults) -> None:
        tier = self._tier
        if not sampling.is_plain or sampling.work not in tier.finish:
            ((step, forwarded),) = tier.found
            num_seqs, num_rows = self._built.num_samples, self._built.batch.input_ids.shape[0]
            step = step.narrowed(num_seqs, num_rows)
            forwarded = forwarded._replace(logits=forwarded.logits[:num_rows])
            finish_eagerly(self._program, step, forwarded, self._built, sampling, host)
            return
        if tier.controls_of is not sampling:
            packed = self._runtime.pinned(tuple(tier.controls.shape), torch.int64)
            sampling.pack_into(packed)
            tier.controls.copy_(packed, non_blocking=True)
            tier.controls_of = sampling
        graph = tier.finish[sampling.work]
        graph.graph.replay()
        (finished,) = graph.found
        host.copy(finished.results)

    def _forward_of_padding(self) -> None:
        self._tier.inputs.copy_(self._tier.layout.padding)
        self._tier.forward.replay()

    def _capture(self, sampling: SamplingBatch) -> _FinishGraph:
        program, tier, kind = self._program, self._tier, sampling.work
        never = None if sampling.never is None else _on_device(sampling.never, self._runtime)
        controls = SamplingBatch.plain(tier.controls, kind, never)
        self._runtime.compute_stream.enqueue(lambda: program.allocate_draft_logits(kind))
        found: list[Finished] = []

        def work() -> None:
            ((step, forwarded),) = tier.found
            # A step whose drafts nobody can use drafts nonetheless; there is one graph less.
            found[:] = [program.finish(step, forwarded, controls, drafts=True)]

        return _FinishGraph(self._memory.capture(self._name(sampling), work), found)

    def _name(self, sampling: SamplingBatch) -> str:
        return f"{sampling.work.name.lower()} sampling, {self._tier.controls.shape[1]} requests"


def _on_device(host: Tensor, runtime: Runtime) -> Tensor:
    """A copy on the device; set-up, which waits for the compute stream."""
    placed: list[Tensor] = []
    stream = runtime.compute_stream
    stream.enqueue(lambda: placed.append(host.to(runtime.device, copy=True)))
    stream.synchronize()
    return placed[0]
