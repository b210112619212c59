"""Host tensors of a step: what the model needs, row by row and request by request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.ops.state import NEWCOMER
from deepinfer.device.runtime import StepKind
from deepinfer.engine.host_tensor import int64_tensor
from deepinfer.engine.remap import Remap, ResultRing
from deepinfer.engine.slot_table import SlotTable
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata
from deepinfer.model.config import V41Config
from deepinfer.model.replay import batch_replay
from deepinfer.model.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step ready to launch.

    Attributes:
        batch: model inputs; logits rows are the sampling rows, then the prompt rows scored.
        num_newcomers: requests whose ids and history are from the host.
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
    num_newcomers: int
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


class BatchBuilder:
    """Builds the steps of one rank, in the order in which they are launched."""

    def __init__(self, config: V41Config, ring: ResultRing) -> None:
        """A builder for a model.

        Args:
            config: the model.
            ring: where results stand on the device; a row for each slot.
        """
        self._num_history, self._ring = config.history_len, ring
        self._table = SlotTable(ring.rows_per_step, config.num_hidden_layers)
        # Parts of steps are slices of these, which nobody writes: making small tensors adds up.
        self._numbers = torch.arange(ring.num_rows)
        self._no_history = torch.full((ring.rows_per_step, self._num_history), -1)

    def build(self, scheduled: SchedulerOutputs, remap: Remap) -> BuiltStep:
        """Tensors for the forward of a non-empty step.

        Args:
            scheduled: what runs.
            remap: from the steps in flight to it.
        Raises:
            ContractError: the remap takes a token from the host that only the device knows.
        """
        sequences, decodes = scheduled.sequences, scheduled.kind is StepKind.DECODE
        num_seqs, num_rows = len(sequences), scheduled.num_rows
        query_lens = [metadata.query_len for metadata in sequences]
        context_lens = [metadata.context_len for metadata in sequences]
        slots = self._table.rows(sequences)
        first_rows = range(num_seqs) if decodes else _starts(query_lens)
        input_ids, history = self._host_tokens(scheduled, remap, first_rows)
        scored: list[_ScoredRow] = []
        if decodes:
            logits_rows = self._count_to(num_rows)
            result_seqs = self._count_to(num_seqs)
        else:
            for metadata, row in zip(sequences, first_rows, strict=True):
                if metadata.scores_prompt:
                    scored += _scored_rows(metadata, row)
            deciding = [index for index, metadata in enumerate(sequences) if metadata.samples]
            last_rows = [first_rows[index] + sequences[index].query_len - 1 for index in deciding]
            logits_rows = int64_tensor(last_rows + [entry.row for entry in scored])
            result_seqs = int64_tensor(deciding)
        num_samples = result_seqs.shape[0]
        first_result = self._ring.first_row(scheduled.step)
        # The bounds of a sequence may lie beyond its limit, its rows and blocks never do.
        lens, contexts = int64_tensor(query_lens), int64_tensor(context_lens)
        stops = np.minimum(contexts.numpy() + lens.numpy(), slots.limits.numpy())
        batch = StepBatch(
            kind=scheduled.kind,
            input_ids=input_ids,
            query_lens=lens,
            context_lens=contexts,
            seq_slots=slots.seq_slots,
            block_table=slots.block_table,
            history=history,
            logits_rows=logits_rows,
            max_query_len=max(query_lens),
            max_key_len=int(stops.max()),
            replay=None
            if decodes
            else batch_replay([m.sequence.rows for m in sequences], context_lens, query_lens),
        )
        budget = scheduled.draft_budget
        return BuiltStep(
            batch=batch,
            num_newcomers=remap.rows.count(NEWCOMER),
            num_samples=num_samples,
            remap=int64_tensor(remap.rows),
            limits=slots.limits,
            result_rows=self._numbers[first_result : first_result + num_samples],
            result_seqs=result_seqs,
            draft_budget=int64_tensor([] if budget is None else [budget]),
            draft_floors=slots.draft_floors,
            drafts=any(_can_use_drafts(metadata) for metadata in sequences),
            prompt_targets=[entry.target for entry in scored],
            num_prompt_top=max((entry.num_top for entry in scored), default=0),
        )

    def _host_tokens(
        self, scheduled: SchedulerOutputs, remap: Remap, first_rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Ids of all rows and history of all sequences, as far as the host knows them.

        The device knows better than what stands there for those with results in flight, and lays
        out the rows of a decode step: the host gives its first tokens only.
        """
        decodes, width = scheduled.kind is StepKind.DECODE, self._num_history
        input_ids = torch.zeros(scheduled.num_rows, dtype=torch.int64)
        history = self._no_history[: len(scheduled.sequences)]
        newcomers = [index for index, source in enumerate(remap.rows) if source == NEWCOMER]
        if not newcomers:
            return input_ids, history
        fed: list[int] = []
        places: list[int] = []
        before: list[int] = []
        for index in newcomers:
            metadata = scheduled.sequences[index]
            start, row, token_ids = (
                metadata.context_len,
                first_rows[index],
                metadata.sequence.token_ids,
            )
            stop = start + (1 if decodes else metadata.query_len)
            if not 0 <= start < stop <= len(token_ids):
                raise ContractError(
                    f"step {scheduled.step} takes positions {start} to {stop - 1} of request "
                    f"{metadata.sequence.request.request_id} from the host, which knows "
                    f"{len(token_ids)} tokens; the remap should name a result in flight"
                )
            fed += token_ids[start:stop]
            places += range(row, row + stop - start)
            last = token_ids[max(0, start - width) : start]
            before += [-1] * (width - len(last)) + last
        # Through numpy, and all at once: an assignment to each row costs many times more.
        input_ids.numpy()[places] = fed
        history = history.clone()
        history.numpy()[newcomers] = np.array(before, dtype=np.int64).reshape(len(newcomers), width)
        return input_ids, history

    def _count_to(self, stop: int) -> Tensor:
        if stop > self._numbers.shape[0]:
            self._numbers = torch.arange(2 * stop)
        return self._numbers[:stop]


def _starts(query_lens: list[int]) -> list[int]:
    """First row of each sequence of a prefill step."""
    return [0, *itertools.accumulate(query_lens[:-1])]


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
