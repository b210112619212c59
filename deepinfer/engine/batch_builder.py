"""Host tensors of a step: what the model needs, row by row and request by request."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.device.ops.state import NEWCOMER
from deepinfer.device.runtime import StepKind
from deepinfer.engine.host_tensor import int64_tensor
from deepinfer.engine.remap import Remap, ResultRing
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata
from deepinfer.model.config import V41Config
from deepinfer.model.replay import batch_replay
from deepinfer.model.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step ready to launch.

    Attributes:
        batch: model inputs; logits rows are the sampling rows, then the prompt rows scored.
        num_samples: sampling rows N.
        remap: [R] int64 ring row of each sequence's latest result in flight, or NEWCOMER, whose
            ids and lengths in `batch` are exact.
        limits: [R] int64 most positions of each sequence that may ever be computed.
        result_rows: [N] int64 ring row where each sampling row's result goes.
        result_seqs: [N] int64 request of each sampling row.
        prompt_targets: next prompt token of each scored prompt row.
        num_prompt_top: alternatives wanted for prompt rows.
    """

    batch: StepBatch
    num_samples: int
    remap: Tensor
    limits: Tensor
    result_rows: Tensor
    result_seqs: Tensor
    prompt_targets: list[int]
    num_prompt_top: int


def build_step(
    scheduled: SchedulerOutputs, remap: Remap, ring: ResultRing, config: V41Config
) -> BuiltStep:
    """Tensors for the forward of a non-empty step.

    Args:
        scheduled: what runs.
        remap: from the steps in flight to it.
        ring: where results stand on the device.
        config: the model.
    """
    sequences, num_history = scheduled.sequences, config.history_len
    input_ids: list[int] = []
    history: list[int] = []
    sample_rows: list[int] = []
    scored: list[_ScoredRow] = []
    for metadata, source in zip(sequences, remap.rows, strict=True):
        first_row, query_len = len(input_ids), metadata.query_len
        if metadata.samples:
            sample_rows.append(first_row + query_len - 1)
        if source != NEWCOMER:
            # The device knows better; any valid id does.
            input_ids += [0] * query_len
            history += [-1] * num_history
            continue
        token_ids, start = metadata.sequence.token_ids, metadata.context_len
        known = token_ids[start : start + query_len]
        input_ids += known + [0] * (query_len - len(known))
        before = token_ids[max(0, start - num_history) : start]
        history += [-1] * (num_history - len(before)) + before
        if metadata.scores_prompt:
            scored += _scored_rows(metadata, first_row)
    query_lens = [metadata.query_len for metadata in sequences]
    context_lens = [metadata.context_len for metadata in sequences]
    prefills = scheduled.kind is StepKind.PREFILL
    rows = [metadata.sequence.rows for metadata in sequences]
    num_seqs, first_result = len(sequences), ring.first_row(scheduled.step)
    batch = StepBatch(
        kind=scheduled.kind,
        input_ids=int64_tensor(input_ids),
        query_lens=int64_tensor(query_lens),
        context_lens=int64_tensor(context_lens),
        seq_slots=int64_tensor(metadata.slot for metadata in sequences),
        block_table=_block_table(sequences),
        history=int64_tensor(history).view(num_seqs, num_history),
        logits_rows=int64_tensor(sample_rows + [entry.row for entry in scored]),
        max_query_len=max(query_lens),
        max_key_len=max(map(operator.add, context_lens, query_lens)),
        replay=batch_replay(rows, context_lens, query_lens) if prefills else None,
    )
    return BuiltStep(
        batch=batch,
        num_samples=len(sample_rows),
        remap=int64_tensor(remap.rows),
        # The last token of a sequence is never fed, so its position is never computed.
        limits=int64_tensor(metadata.sequence.max_len - 1 for metadata in sequences),
        result_rows=torch.arange(first_result, first_result + len(sample_rows)),
        result_seqs=int64_tensor(
            index for index, metadata in enumerate(sequences) if metadata.samples
        ),
        prompt_targets=[entry.target for entry in scored],
        num_prompt_top=max((entry.num_top for entry in scored), default=0),
    )


class _ScoredRow(NamedTuple):
    """A prompt row whose logits are wanted: the row, the token it predicts, alternatives."""

    row: int
    target: int
    num_top: int


def _scored_rows(metadata: SequenceMetadata, first_row: int) -> list[_ScoredRow]:
    request, start = metadata.sequence.request, metadata.context_len
    prompt, num_top = request.prompt_token_ids, request.params.prompt_logprobs or 0
    # Row p predicts token p + 1; the last prompt row predicts the first output.
    stop = min(start + metadata.query_len, len(prompt) - 1)
    return [
        _ScoredRow(first_row + position - start, prompt[position + 1], num_top)
        for position in range(start, stop)
    ]


def _block_table(sequences: tuple[SequenceMetadata, ...]) -> Tensor:
    """[R, most blocks of a sequence]; flat lists, because a nested one converts slowly."""
    blocks = [metadata.sequence.blocks for metadata in sequences]
    width = max(map(len, blocks))
    flat: list[int] = []
    for held in blocks:
        flat += held
        flat += [-1] * (width - len(held))
    return int64_tensor(flat).view(len(blocks), width)
