"""What a launched step will need later, in the published terms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.device.runtime import Event, StepKind
from deepinfer.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceMetadata:
    """One sequence's part in a step, as it was when the step was scheduled.

    Attributes:
        sequence: the sequence.
        generation: its generation at scheduling; a result of another generation is ignored.
        context_len: positions computed before this step.
        query_len: positions computed by it.
        samples: whether its last row yields a token.
        scores_prompt: whether its rows' logits are wanted for prompt logprobs.
    """

    sequence: Sequence
    generation: int
    context_len: int
    query_len: int
    samples: bool
    scores_prompt: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutputs:
    """The decision for one step: its kind and the sequences in row order."""

    kind: StepKind
    sequences: tuple[SequenceMetadata, ...]

    @property
    def num_rows(self) -> int:
        return sum(metadata.query_len for metadata in self.sequences)


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Pinned log probabilities: chosen [n], rank [n], top_ids [n, k], top_values [n, k]."""

    chosen: Tensor
    rank: Tensor
    top_ids: Tensor
    top_values: Tensor


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Pinned results of a step; valid once the step's `sampled` event has happened.

    Attributes:
        token_ids: [N, 1 + max_drafts] int64 per sampling sequence.
        num_accepted: [N] int64 drafts accepted; 0 without speculation.
        finite: [N] bool, False where the logits cannot be sampled from.
        logprobs: of the sampled tokens, or None.
        prompt_logprobs: of the prompt rows scored, in row order, or None.
    """

    token_ids: Tensor
    num_accepted: Tensor
    finite: Tensor
    logprobs: HostLogprobs | None
    prompt_logprobs: HostLogprobs | None


@dataclass(frozen=True, slots=True)
class WorkerStepState:
    """A step in flight: what was scheduled, where its results arrive, the events of both ends.

    Attributes:
        step: number of the step.
        scheduled: what it computes.
        sampler_output: pinned results.
        forwarded: event after the forward.
        sampled: event after sampling and the copy to the host.
    """

    step: int
    scheduled: SchedulerOutputs
    sampler_output: SamplerOutput
    forwarded: Event
    sampled: Event
