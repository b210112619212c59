"""The sampling controls of each step, from what is committed when they are built."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from deepinfer.device.runtime import StepKind
from deepinfer.engine.commit import StopRules
from deepinfer.engine.sampling_batch import SampledRequest, SamplingBatch, build_sampling_batch
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata


class SamplingBuilder:
    """Builds step after step; one with the requests of the step before is that one's batch.

    That is most decode steps. It holds while no request has a constraint: the host works out its
    masks token by token, those of the drafts included. A token that is known already is the only
    one that its row allows.
    """

    def __init__(self, vocab_size: int, rules: StopRules) -> None:
        """A builder for one model.

        Args:
            vocab_size: of the model.
            rules: ids that end an answer, removed while a row is short of min_tokens, and ids
                that are always removed.
        """
        self._vocab_size, self._rules = vocab_size, rules
        self._sequences: list[Sequence] = []
        self._slots: list[int] = []
        self._batch: SamplingBatch | None = None

    def build(self, scheduled: SchedulerOutputs) -> SamplingBatch:
        """Controls of the sequences of a step that sample.

        A constrained sequence has to be at its newest token: no step in flight may yield another.
        """
        sampling = [metadata for metadata in scheduled.sequences if metadata.samples]
        sequences = [metadata.sequence for metadata in sampling]
        slots = [metadata.slot for metadata in sampling]
        # Only the end of a prefill has a known token, and a constraint is there from the start.
        is_known = scheduled.kind is StepKind.PREFILL and _has_masks(sampling)
        same = sequences == self._sequences and slots == self._slots
        if self._batch is not None and same and not is_known:
            return self._batch
        batch = build_sampling_batch(
            [self._request(metadata) for metadata in sampling],
            self._vocab_size,
            eos_token_ids=sorted(self._rules.eos_token_ids),
            never_token_ids=self._rules.never_token_ids,
        )
        self._sequences, self._slots = sequences, slots
        self._batch = None if _has_masks(sampling) else batch
        return batch

    def _request(self, metadata: SequenceMetadata) -> SampledRequest:
        sequence, request = metadata.sequence, metadata.sequence.request
        return SampledRequest(
            params=request.params,
            controls=request.controls,
            seed=request.seed,
            sample_index=sequence.index,
            num_prompt_tokens=sequence.num_prompt_tokens,
            slot=metadata.slot,
            masks=self._masks(metadata),
        )

    def _masks(self, metadata: SequenceMetadata) -> tuple[Tensor | None, ...]:
        """Masks of a sequence's rows: after the newest token, after its first draft, ...

        They end at the first draft that may not stand or that ends the answer: what follows is
        refused or dropped, whatever it is.
        """
        if metadata.known_token >= 0:
            only = torch.zeros(self._vocab_size, dtype=torch.bool)
            only[metadata.known_token] = True
            return (only,)
        sequence, constraint = metadata.sequence, metadata.sequence.constraint
        # A sequence that ended or moved on meanwhile has no row to constrain.
        if constraint is None or not metadata.is_current:
            return ()
        masks = [constraint.mask(0)]
        for draft_id in sequence.draft_ids[: metadata.query_len - 1]:
            allowed = masks[-1]
            if draft_id < 0 or not (allowed is None or bool(allowed[draft_id])):
                break
            if self._rules.ends_answer(draft_id, sequence.request.params):
                break
            constraint.advance(draft_id)
            masks.append(constraint.mask(0))
        constraint.rollback(len(masks) - 1)
        return tuple(masks)


def _has_masks(sampling: Rows[SequenceMetadata]) -> bool:
    return any(
        metadata.known_token >= 0 or metadata.sequence.constraint is not None
        for metadata in sampling
    )
