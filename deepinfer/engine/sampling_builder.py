"""The sampling controls of each step, from what is committed when they are built."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace

from deepinfer.engine.commit import StopRules
from deepinfer.engine.host_tensor import int64_tensor
from deepinfer.engine.sampling_batch import SamplingBatch, SamplingRow, build_sampling_batch
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata


class SamplingBuilder:
    """Builds step after step; one with the rows of the step before only moves the positions.

    That is most decode steps. It holds for rows without a constraint and whose requests neither
    remove nor bias tokens: for the others the host looks at every token.
    """

    def __init__(self, vocab_size: int, rules: StopRules) -> None:
        """A builder for one model.

        Args:
            vocab_size: of the model.
            rules: ids that end an answer, removed while a row is short of min_tokens, and ids
                that are always removed.
        """
        self._vocab_size, self._rules = vocab_size, rules
        self._rows: list[tuple[Sequence, int]] = []
        self._batch: SamplingBatch | None = None

    def build(self, scheduled: SchedulerOutputs) -> SamplingBatch:
        """Controls of the rows of a step that sample."""
        sampling = [metadata for metadata in scheduled.sequences if metadata.samples]
        rows = [(metadata.sequence, metadata.slot) for metadata in sampling]
        if self._batch is not None and rows == self._rows:
            # A step in flight may still read the tensors of the one before.
            integers = self._batch.integers.clone()
            integers[3] = int64_tensor(m.context_len + m.query_len for m in sampling)
            return replace(self._batch, integers=integers)
        batch = build_sampling_batch(
            [_row(metadata) for metadata in sampling],
            self._vocab_size,
            eos_token_ids=sorted(self._rules.eos_token_ids),
            never_token_ids=self._rules.never_token_ids,
        )
        self._rows, self._batch = rows, batch if _are_free(sampling) else None
        return batch


def _are_free(sampling: Rows[SequenceMetadata]) -> bool:
    return all(
        metadata.sequence.request.controls.is_free and metadata.sequence.constraint is None
        for metadata in sampling
    )


def _row(metadata: SequenceMetadata) -> SamplingRow:
    sequence, request = metadata.sequence, metadata.sequence.request
    stop = metadata.context_len + metadata.query_len
    # A sequence that ended or moved on meanwhile has no row to constrain.
    constraint = sequence.constraint if metadata.is_current else None
    return SamplingRow(
        params=request.params,
        controls=request.controls,
        seed=request.seed,
        sample_index=sequence.index,
        position=stop,
        num_output_tokens=stop - sequence.num_prompt_tokens,
        slot=metadata.slot,
        mask=None if constraint is None else constraint.mask(0),
    )
