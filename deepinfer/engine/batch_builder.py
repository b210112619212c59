"""Host tensors of a step: what the model needs, row by row and request by request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.engine.commit import StopRules
from deepinfer.engine.remap import Remap, ResultRing
from deepinfer.engine.sampling_batch import SamplingBatch, SamplingRow, build_sampling_batch
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata
from deepinfer.model.config import V41Config
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
    history_len = config.history_len
    input_ids: list[int] = []
    history: list[list[int]] = []
    sample_rows: list[int] = []
    prompt_rows: list[int] = []
    prompt_targets: list[int] = []
    num_prompt_top = 0
    for metadata in scheduled.sequences:
        sequence, start = metadata.sequence, metadata.context_len
        stop = start + metadata.query_len
        first_row = len(input_ids)
        known = sequence.token_ids[start:stop]
        # Any valid id does where the device knows better: for the token and its drafts.
        input_ids += known + [0] * (metadata.query_len - len(known))
        before = sequence.token_ids[max(0, start - history_len) : start]
        history.append([-1] * (history_len - len(before)) + before)
        if metadata.scores_prompt:
            prompt = sequence.request.prompt_token_ids
            # Row p predicts token p + 1; the last prompt row predicts the first output.
            scored = range(start, min(stop, len(prompt) - 1))
            prompt_rows += [first_row + position - start for position in scored]
            prompt_targets += [prompt[position + 1] for position in scored]
            num_prompt_top = max(num_prompt_top, sequence.request.params.prompt_logprobs or 0)
        if metadata.samples:
            sample_rows.append(len(input_ids) - 1)
    width = max(len(metadata.sequence.blocks) for metadata in scheduled.sequences)
    tables = [
        metadata.sequence.blocks + [-1] * (width - len(metadata.sequence.blocks))
        for metadata in scheduled.sequences
    ]
    batch = StepBatch(
        kind=scheduled.kind,
        input_ids=torch.tensor(input_ids),
        query_lens=torch.tensor([m.query_len for m in scheduled.sequences]),
        context_lens=torch.tensor([m.context_len for m in scheduled.sequences]),
        seq_slots=torch.tensor([m.sequence.slot for m in scheduled.sequences]),
        block_table=torch.tensor(tables),
        history=torch.tensor(history),
        logits_rows=torch.tensor(sample_rows + prompt_rows, dtype=torch.int64),
        max_query_len=max(m.query_len for m in scheduled.sequences),
        max_key_len=max(m.context_len + m.query_len for m in scheduled.sequences),
    )
    return BuiltStep(
        batch=batch,
        num_samples=len(sample_rows),
        remap=torch.tensor(remap.rows),
        # The last token of a sequence is never fed, so its position is never computed.
        limits=torch.tensor([m.sequence.max_len - 1 for m in scheduled.sequences]),
        result_rows=torch.tensor(list(ring.result_rows(scheduled).values()), dtype=torch.int64),
        result_seqs=torch.tensor(
            [index for index, m in enumerate(scheduled.sequences) if m.samples], dtype=torch.int64
        ),
        prompt_targets=prompt_targets,
        num_prompt_top=num_prompt_top,
    )


def build_sampling(
    scheduled: SchedulerOutputs, config: V41Config, rules: StopRules
) -> SamplingBatch:
    """Sampling controls of the rows that sample, from what is committed now.

    Args:
        scheduled: what runs.
        config: the model.
        rules: ids that end an answer, removed while a row is short of min_tokens, and ids that
            are always removed.
    """
    rows: list[SamplingRow] = []
    for metadata in scheduled.sequences:
        if not metadata.samples:
            continue
        sequence = metadata.sequence
        stop = metadata.context_len + metadata.query_len
        rows.append(
            SamplingRow(
                params=sequence.request.params,
                seed=sequence.request.seed,
                sample_index=sequence.index,
                position=stop,
                num_output_tokens=stop - sequence.num_prompt_tokens,
                slot=metadata.slot,
                mask=_mask(metadata),
            )
        )
    return build_sampling_batch(
        rows,
        config.vocab_size,
        eos_token_ids=sorted(rules.eos_token_ids),
        never_token_ids=rules.never_token_ids,
    )


def _mask(metadata: SequenceMetadata) -> Tensor | None:
    """Tokens that a constraint allows; none for a sequence that ended or moved on meanwhile."""
    constraint = metadata.sequence.constraint
    return constraint.mask(0) if constraint is not None and metadata.is_current else None
