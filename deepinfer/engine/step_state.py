"""What a launched step will need later, in the published terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from deepinfer.cache.host_tier import HostState
from deepinfer.device.runtime import Event, StepKind
from deepinfer.engine.sequence import Sequence


class SequenceMetadata(NamedTuple):
    """One sequence's part in a step, as it was when the step was scheduled.

    With results in flight the host knows bounds only: lengths are the largest possible, the
    device corrects them (ZO-5, ZO-6).

    Attributes:
        sequence: the sequence.
        generation: its generation at scheduling; a result of another generation is ignored.
        slot: its persistent slot then; the sequence may have lost it since.
        context_len: most positions computed before this step.
        query_len: most positions computed by it: a chunk, or a token and its drafts.
        samples: whether its last row yields a token.
        scores_prompt: whether its rows' logits are wanted for prompt logprobs.
        saves_window: whether its windows are saved as they are after its last row.
        known_token: the token that its last row yields, where that was decided before a
            preemption; -1: it is not known.
    """

    sequence: Sequence
    generation: int
    slot: int
    context_len: int
    query_len: int
    samples: bool
    scores_prompt: bool
    saves_window: bool = False
    known_token: int = -1

    # A named tuple, because one is made for every row of every step.

    @property
    def stop(self) -> int:
        """Position after its last row, at most."""
        return self.context_len + self.query_len

    @property
    def is_current(self) -> bool:
        """Whether the sequence still is the one that was scheduled (ZO-8)."""
        return self.generation == self.sequence.generation


@dataclass(frozen=True, slots=True)
class SchedulerOutputs:
    """The decision for one step.

    Attributes:
        step: number of the step; an empty step has that of the next one.
        kind: what it computes.
        sequences: in row order.
        draft_budget: drafts of the whole decode step, which the device deals out within the
            sequences' bounds; None: every sequence verifies as many as its bound says.
        num_rows: rows of the step at most.
    """

    step: int
    kind: StepKind
    sequences: tuple[SequenceMetadata, ...]
    draft_budget: int | None = None
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        # Once: several look at it, and a step may have hundreds of sequences.
        num_rows = sum([metadata.query_len for metadata in self.sequences])
        if self.draft_budget is not None:
            num_rows = min(num_rows, len(self.sequences) + self.draft_budget)
        object.__setattr__(self, "num_rows", num_rows)


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Pinned log probabilities: chosen [n], rank [n], top_ids [n, k], top_values [n, k].

    For sampled tokens n is N * (1 + max_drafts), row by row.
    """

    chosen: Tensor
    rank: Tensor
    top_ids: Tensor
    top_values: Tensor


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Pinned results of a step; valid once the step's `sampled` event has happened.

    A device's are views of one tensor, which is why `finite` may be int64 and `survival` fp64.

    Attributes:
        token_ids: [N, 1 + max_drafts] int64 per sampling sequence: accepted drafts, the token
            after them, then -1.
        num_accepted: [N] int64 drafts accepted; 0 without speculation.
        num_verified: [N] int64 drafts that were asked about.
        finite: [N, 1 + max_drafts] bool or int64, 0 where the logits behind a token cannot be
            sampled from.
        draft_ids: [N, max_drafts] int64 drafts for the sequence's next step; -1 none.
        survival: [N, max_drafts] fp32 or fp64 probability that they are all accepted up to each.
        logprobs: of the sampled tokens, or None.
        prompt_logprobs: of the prompt rows scored, in row order, or None.
    """

    token_ids: Tensor
    num_accepted: Tensor
    num_verified: Tensor
    finite: Tensor
    draft_ids: Tensor
    survival: Tensor
    logprobs: HostLogprobs | None
    prompt_logprobs: HostLogprobs | None


class DeviceWork(NamedTuple):
    """A piece of a step on the device, between two timed events."""

    name: str
    begin: Event
    end: Event


@dataclass(frozen=True, slots=True)
class WorkerStepState:
    """A step in flight: what was scheduled, where its results arrive, the events of both ends.

    Attributes:
        scheduled: what it computes.
        sampler_output: pinned results.
        forwarded: event after the forward.
        sampled: event after sampling and the copy to the host.
        saved_windows: in host memory, or on their way there: of each sequence that saves its own.
        device_work: forward and sampling with their times; empty when no times were asked for.
    """

    scheduled: SchedulerOutputs
    sampler_output: SamplerOutput
    forwarded: Event
    sampled: Event
    saved_windows: tuple[tuple[SequenceMetadata, HostState], ...] = ()
    device_work: tuple[DeviceWork, ...] = ()
