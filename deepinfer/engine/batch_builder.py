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
        draft_budget: [1] int64 drafts that the device deals out; empty: it deals out none.
        draft_floors: [R] int64 first position whose rows have left the last layer: a drafter's
            context begins there.
        drafts: whether any sequence can use drafts after this step.
        prompt_targets: next prompt token of each scored prompt row.
        num_prompt_top: alternatives wanted for prompt rows.
    """

    batch: StepBatch
    num_samples: int
    remap: Tensor
    limits: Tensor
    result_rows: Tensor
    result_seqs: Tensor
    draft_budget: Tensor
    draft_floors: Tensor
    drafts: bool
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
    sequences, decodes = scheduled.sequences, scheduled.kind is StepKind.DECODE
    num_history = config.history_len
    input_ids: list[int] = []
    history: list[int] = []
    logits_rows: list[int] = []
    scored: list[_ScoredRow] = []
    for metadata, source in zip(sequences, remap.rows, strict=True):
        first_row, start = len(input_ids), metadata.context_len
        # Of a decode step the host gives the first tokens only; the device lays out the rows.
        num_tokens = 1 if decodes else metadata.query_len
        if source != NEWCOMER:
            # The device knows better; any valid id does.
            input_ids += [0] * num_tokens
            history += [-1] * num_history
        else:
            token_ids = metadata.sequence.token_ids
            before = token_ids[max(0, start - num_history) : start]
            input_ids += token_ids[start : start + num_tokens]
            history += [-1] * (num_history - len(before)) + before
        if not decodes and metadata.samples:
            logits_rows.append(first_row + num_tokens - 1)
        if metadata.scores_prompt:
            scored += _scored_rows(metadata, first_row)
    num_samples = len(sequences) if decodes else len(logits_rows)
    if decodes:
        input_ids += [0] * (scheduled.num_rows - len(sequences))
        logits_rows = list(range(scheduled.num_rows))
    query_lens = [metadata.query_len for metadata in sequences]
    context_lens = [metadata.context_len for metadata in sequences]
    rows = [metadata.sequence.rows for metadata in sequences]
    # The last token of a sequence is never fed, so its position is never computed.
    limits = [metadata.sequence.max_len - 1 for metadata in sequences]
    first_result = ring.first_row(scheduled.step)
    batch = StepBatch(
        kind=scheduled.kind,
        input_ids=int64_tensor(input_ids),
        query_lens=int64_tensor(query_lens),
        context_lens=int64_tensor(context_lens),
        seq_slots=int64_tensor(metadata.slot for metadata in sequences),
        block_table=_block_table(sequences),
        history=int64_tensor(history).view(len(sequences), num_history),
        logits_rows=int64_tensor(logits_rows + [entry.row for entry in scored]),
        max_query_len=max(query_lens),
        # The bounds of a sequence may lie beyond its limit, its rows and blocks never do.
        max_key_len=max(map(min, map(operator.add, context_lens, query_lens), limits)),
        replay=None if decodes else batch_replay(rows, context_lens, query_lens),
    )
    return BuiltStep(
        batch=batch,
        num_samples=num_samples,
        remap=int64_tensor(remap.rows),
        limits=int64_tensor(limits),
        result_rows=torch.arange(first_result, first_result + num_samples),
        result_seqs=torch.arange(num_samples)
        if decodes
        else int64_tensor(index for index, metadata in enumerate(sequences) if metadata.samples),
        draft_budget=int64_tensor(
            [] if scheduled.draft_budget is None else [scheduled.draft_budget]
        ),
        draft_floors=int64_tensor(
            metadata.sequence.draft_floor(config.num_hidden_layers) for metadata in sequences
        ),
        drafts=any(_can_use_drafts(metadata) for metadata in sequences),
        prompt_targets=[entry.target for entry in scored],
        num_prompt_top=max((entry.num_top for entry in scored), default=0),
    )


def _can_use_drafts(metadata: SequenceMetadata) -> bool:
    """Whether two tokens or more may follow what this step yields for certain.

    A single one needs no draft: its row is that of the newest token.
    """
    sequence = metadata.sequence
    return metadata.samples and sequence.least_len + 2 <= sequence.max_len


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
