"""Reference of the state family: integer arithmetic on the device, no host reads."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import state
from deepinfer.device.ops.state import (
    NEWCOMER,
    CompressPlan,
    NextInputs,
    RowLayout,
    StepInputs,
    StepResults,
    WindowPlan,
)
from deepinfer.device.runtime import StepKind
from deepinfer_reference.ops.kv import entry_slots


def row_layout(query_lens: Tensor, context_lens: Tensor, num_rows: int) -> RowLayout:
    starts = torch.nn.functional.pad(torch.cumsum(query_lens, 0), (1, 0))
    row = torch.arange(num_rows)
    row_seq = torch.searchsorted(starts[1:], row, right=True)
    row_seq = row_seq.clamp_max(query_lens.shape[0] - 1)
    valid = row < starts[-1]
    offset = torch.where(valid, row - starts[row_seq], 0)
    positions = torch.where(valid, context_lens[row_seq] + offset, 0)
    return RowLayout(row_seq, offset, positions, valid, starts)


def correct_inputs(
    host: StepInputs, draft_ids: Tensor, limits: Tensor, remap: Tensor, results: StepResults
) -> StepInputs:
    source = remap.clamp_min(0)
    follows = remap != NEWCOMER
    context_lens = torch.where(follows, results.context_lens[source], host.context_lens)
    history = torch.where(follows.unsqueeze(1), results.history[source], host.history)
    num_tokens = 1 + (draft_ids >= 0).cumprod(1).sum(1)
    room = (limits - context_lens).clamp_min(0)
    query_lens = torch.minimum(torch.minimum(host.query_lens, num_tokens), room)
    num_rows = host.input_ids.shape[0]
    if num_rows == 0:
        return StepInputs(host.input_ids, query_lens, context_lens, history)

    newest = results.token_ids.gather(1, results.num_accepted.unsqueeze(1)).squeeze(1)
    own = host.input_ids[torch.arange(remap.shape[0]).clamp_max(num_rows - 1)]
    first = torch.where(follows, newest[source], own)
    fed = torch.cat((first.unsqueeze(1), draft_ids), dim=1)
    rows = row_layout(query_lens, context_lens, num_rows)
    tokens = torch.where(rows.valid, fed[rows.row_seq, rows.row_offset], 0)
    return StepInputs(tokens, query_lens, context_lens, history)


def next_inputs(
    inputs: StepInputs, seqs: Tensor, num_accepted: Tensor, *, kind: StepKind
) -> NextInputs:
    kept = inputs.query_lens[seqs]
    if kind is StepKind.DECODE:
        kept = torch.minimum(kept, 1 + num_accepted)
    before = inputs.history[seqs]
    width = before.shape[1]
    # Offset of each history token from the request's first row; negative: from before the step.
    offset = kept.unsqueeze(1) + torch.arange(-width, 0)
    from_before = before.gather(1, (width + offset).clamp(0, width - 1))
    if inputs.input_ids.shape[0] == 0:
        return NextInputs(inputs.context_lens[seqs] + kept, from_before)
    starts = torch.cumsum(inputs.query_lens, 0) - inputs.query_lens
    row = (starts[seqs].unsqueeze(1) + offset).clamp(0, inputs.input_ids.shape[0] - 1)
    history = torch.where(offset < 0, from_before, inputs.input_ids[row])
    return NextInputs(inputs.context_lens[seqs] + kept, history)


def window_plan(
    rows: RowLayout,
    query_lens: Tensor,
    context_lens: Tensor,
    seq_slots: Tensor,
    floors: Tensor,
    *,
    kind: StepKind,
    window: int,
    ring: int,
) -> WindowPlan:
    seq, valid = rows.row_seq, rows.valid
    ring_base = seq_slots * ring
    key_position = rows.positions.unsqueeze(1) + torch.arange(1 - window, 1)
    readable = (key_position >= floors[seq].unsqueeze(1)) & valid.unsqueeze(1)
    nothing = query_lens.new_empty(0)
    if kind is not StepKind.PREFILL:
        write = torch.where(valid, ring_base[seq] + rows.positions % ring, -1)
        read = torch.where(readable, ring_base[seq].unsqueeze(1) + key_position % ring, -1)
        return WindowPlan(write, read, nothing, nothing, nothing, nothing)

    # Workspace of request r: window - 1 history rows, then its chunk.
    num_seqs = query_lens.shape[0]
    base = rows.query_starts[:-1] + torch.arange(num_seqs) * (window - 1)
    chunk_base = base + (window - 1)
    write = torch.where(valid, chunk_base[seq] + rows.row_offset, -1)
    shift = (chunk_base - context_lens)[seq]
    read = torch.where(readable, shift.unsqueeze(1) + key_position, -1)
    back = torch.arange(1 - window, 0)
    past = context_lens.unsqueeze(1) + back
    present = (past >= 0) & (query_lens > 0).unsqueeze(1)
    history_from = torch.where(present, ring_base.unsqueeze(1) + past % ring, -1).flatten()
    history_to = torch.where(present, chunk_base.unsqueeze(1) + back, -1).flatten()
    kept = valid & (rows.row_offset >= query_lens[seq] - ring)
    commit_to = torch.where(kept, ring_base[seq] + rows.positions % ring, -1)
    return WindowPlan(write, read, history_from, history_to, write, commit_to)


def _empty_plan(capacity: int, like: Tensor) -> CompressPlan:
    """Plan of a step without rows: nothing but padding entries, which have no row to stand for."""
    nothing = like.new_empty(0)
    zeros = like.new_zeros(capacity)
    absent = zeros - 1
    return CompressPlan(absent, zeros, zeros, absent, nothing, nothing, nothing, nothing)


def compress_plan(
    rows: RowLayout,
    query_lens: Tensor,
    seq_slots: Tensor,
    block_table: Tensor,
    *,
    ratio: int,
    block_size: int,
    pending_ring: int,
) -> CompressPlan:
    num_rows, num_seqs = rows.positions.shape[0], query_lens.shape[0]
    completes = rows.valid & (rows.positions % ratio == ratio - 1)
    # At most ceil(query_len / ratio) entries per request; one spare row takes what is not emitted.
    capacity = (num_rows + num_seqs * (ratio - 1)) // ratio
    if num_rows == 0:
        return _empty_plan(capacity, seq_slots)
    rank = torch.where(completes, torch.cumsum(completes, 0) - 1, capacity)
    emit = torch.full((capacity + 1,), -1, dtype=torch.int64)
    emit.scatter_(0, rank, torch.where(completes, torch.arange(num_rows), -1))
    emit = emit[:capacity]
    source = emit.clamp_min(0)
    emitted = emit >= 0
    entries = torch.div(rows.positions, ratio, rounding_mode="floor")
    entries = torch.where(emitted, entries.index_select(0, source), 0)
    owners = rows.row_seq.index_select(0, source)
    slots = entry_slots(entries.unsqueeze(1), owners, block_table, block_size // ratio)
    slots = torch.where(emitted, slots.squeeze(1), -1)
    visible = torch.div(rows.positions + 1, ratio, rounding_mode="floor")
    visible = torch.where(rows.valid, visible, 0)
    if ratio == 1:
        nothing = emit.new_empty(0)
        return CompressPlan(
            emit, entries, entries * ratio, slots, visible, nothing, nothing, nothing
        )
    previous = torch.where(rows.row_offset > 0, torch.arange(num_rows) - 1, -1)
    base = seq_slots[rows.row_seq] * pending_ring
    ring_read = base + (rows.positions - 1).clamp_min(0) % pending_ring
    kept = rows.valid & (rows.row_offset >= query_lens[rows.row_seq] - pending_ring)
    ring_write = torch.where(kept, base + rows.positions % pending_ring, -1)
    return CompressPlan(
        emit, entries, entries * ratio, slots, visible, previous, ring_read, ring_write
    )


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(state.correct_inputs)(correct_inputs)
    table.implements(state.next_inputs)(next_inputs)
    table.implements(state.row_layout)(row_layout)
    table.implements(state.window_plan)(window_plan)
    table.implements(state.compress_plan)(compress_plan)
