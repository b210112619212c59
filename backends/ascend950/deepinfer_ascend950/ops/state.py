"""State family: integer arithmetic on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

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
from deepinfer_ascend950.ops.kv import entry_slots


def row_layout(query_lens: Tensor, context_lens: Tensor, num_rows: int) -> RowLayout:
    starts = pad(torch.cumsum(query_lens, 0), (1, 0))
    row = torch.arange(num_rows, device=query_lens.device)
    row_seq = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    row_seq = row_seq.clamp_max(query_lens.shape[0] - 1)
    valid = row < starts[-1]
    offset = torch.where(valid, row - starts.index_select(0, row_seq), 0)
    positions = torch.where(valid, context_lens.index_select(0, row_seq) + offset, 0)
    return RowLayout(row_seq, offset, positions, valid, starts)


def correct_inputs(
    host: StepInputs, draft_ids: Tensor, limits: Tensor, remap: Tensor, results: StepResults
) -> StepInputs:
    is_new = remap == NEWCOMER
    result = remap.clamp_min(0)
    context_lens = torch.where(
        is_new, host.context_lens, results.context_lens.index_select(0, result)
    )
    history = torch.where(
        is_new.unsqueeze(1), host.history, results.history.index_select(0, result)
    )
    num_tokens = 1 + (draft_ids >= 0).long().cumprod(1).sum(1)
    room = (limits - context_lens).clamp_min(0)
    query_lens = torch.minimum(torch.minimum(host.query_lens, num_tokens), room)
    num_rows, num_seqs = host.input_ids.shape[0], remap.shape[0]
    if num_rows == 0:
        return StepInputs(host.input_ids, query_lens, context_lens, history)

    place = torch.arange(num_seqs, device=remap.device).clamp_max(num_rows - 1)
    newest = results.token_ids.gather(1, results.num_accepted.unsqueeze(1)).squeeze(1)
    own = host.input_ids.index_select(0, place)
    first = torch.where(is_new, own, newest.index_select(0, result))
    following = torch.cat((first.unsqueeze(1), draft_ids), dim=1)
    rows = row_layout(query_lens, context_lens, num_rows)
    of_row = following.index_select(0, rows.row_seq)
    tokens = of_row.gather(1, rows.row_offset.unsqueeze(1)).squeeze(1)
    return StepInputs(torch.where(rows.valid, tokens, 0), query_lens, context_lens, history)


def next_inputs(
    inputs: StepInputs, seqs: Tensor, num_accepted: Tensor, *, kind: StepKind
) -> NextInputs:
    kept = inputs.query_lens.index_select(0, seqs)
    if kind is StepKind.DECODE:
        kept = torch.minimum(kept, num_accepted + 1)
    context_lens = inputs.context_lens.index_select(0, seqs) + kept
    before = inputs.history.index_select(0, seqs)
    width, num_rows = before.shape[1], inputs.input_ids.shape[0]
    # Where each token stands, counted from the first row of the step; below 0: in the history.
    place = kept.unsqueeze(1) + torch.arange(-width, 0, device=seqs.device)
    earlier = before.gather(1, (width + place).clamp(0, width - 1))
    if num_rows == 0:
        return NextInputs(context_lens, earlier)
    starts = (torch.cumsum(inputs.query_lens, 0) - inputs.query_lens).index_select(0, seqs)
    row = (starts.unsqueeze(1) + place).clamp(0, num_rows - 1)
    tokens = inputs.input_ids.index_select(0, row.flatten()).view_as(row)
    return NextInputs(context_lens, torch.where(place < 0, earlier, tokens))


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
    device = query_lens.device
    seq, valid, positions = rows.row_seq, rows.valid, rows.positions
    ring_base = (seq_slots * ring).index_select(0, seq)
    keys = positions.unsqueeze(1) + torch.arange(1 - window, 1, device=device)
    readable = (keys >= floors.index_select(0, seq).unsqueeze(1)) & valid.unsqueeze(1)
    in_ring = ring_base + positions % ring
    nothing = query_lens.new_empty(0)
    if kind is not StepKind.PREFILL:
        write = torch.where(valid, in_ring, -1)
        read = torch.where(readable, ring_base.unsqueeze(1) + keys % ring, -1)
        return WindowPlan(write, read, nothing, nothing, nothing, nothing)

    # A request's part of the workspace: window - 1 rows of history, then its chunk.
    number = torch.arange(1, query_lens.shape[0] + 1, device=device)
    chunk_base = rows.query_starts[:-1] + number * (window - 1)
    write = torch.where(valid, chunk_base.index_select(0, seq) + rows.row_offset, -1)
    shift = (chunk_base - context_lens).index_select(0, seq)
    read = torch.where(readable, shift.unsqueeze(1) + keys, -1)
    back = torch.arange(1 - window, 0, device=device)
    past = context_lens.unsqueeze(1) + back
    present = (past >= 0) & (query_lens > 0).unsqueeze(1)
    slot_base = (seq_slots * ring).unsqueeze(1)
    history_from = torch.where(present, slot_base + past % ring, -1).flatten()
    history_to = torch.where(present, chunk_base.unsqueeze(1) + back, -1).flatten()
    kept = valid & (rows.row_offset >= query_lens.index_select(0, seq) - ring)
    commit_to = torch.where(kept, in_ring, -1)
    return WindowPlan(write, read, history_from, history_to, write, commit_to)


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
    device = query_lens.device
    seq, valid, positions = rows.row_seq, rows.valid, rows.positions
    num_rows, num_seqs = positions.shape[0], query_lens.shape[0]
    # At most ceil(query_len / ratio) entries for each request.
    capacity = (num_rows + num_seqs * (ratio - 1)) // ratio
    nothing = query_lens.new_empty(0)
    if num_rows == 0:
        zeros = query_lens.new_zeros(capacity)
        return CompressPlan(zeros - 1, zeros, zeros, zeros - 1, nothing, nothing, nothing, nothing)
    number = torch.arange(num_rows, device=device)
    completes = valid & (positions % ratio == ratio - 1)
    # One spare place takes the rows that complete nothing.
    rank = torch.where(completes, torch.cumsum(completes.long(), 0) - 1, capacity)
    emit = torch.full((capacity + 1,), -1, dtype=torch.int64, device=device)
    emit = emit.scatter(0, rank, torch.where(completes, number, -1))[:capacity]
    source, emitted = emit.clamp_min(0), emit >= 0
    entry = torch.div(positions, ratio, rounding_mode="floor").index_select(0, source)
    entries = torch.where(emitted, entry, 0)
    owners = seq.index_select(0, source)
    slots = entry_slots(entries.unsqueeze(1), owners, block_table, block_size // ratio)
    slots = torch.where(emitted, slots.squeeze(1), -1)
    visible = torch.div(positions + 1, ratio, rounding_mode="floor")
    visible = torch.where(valid, visible, 0)
    if ratio == 1:
        return CompressPlan(emit, entries, entries, slots, visible, nothing, nothing, nothing)
    previous = torch.where(rows.row_offset > 0, number - 1, -1)
    base = (seq_slots * pending_ring).index_select(0, seq)
    ring_read = base + (positions - 1).clamp_min(0) % pending_ring
    kept = valid & (rows.row_offset >= query_lens.index_select(0, seq) - pending_ring)
    ring_write = torch.where(kept, base + positions % pending_ring, -1)
    return CompressPlan(
        emit, entries, entries * ratio, slots, visible, previous, ring_read, ring_write
    )


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    reason = "torch: integer arithmetic; nothing is read on the host"
    table.implements(state.row_layout, reason=reason, layout="int64")(row_layout)
    table.implements(state.correct_inputs, reason=reason, layout="int64")(correct_inputs)
    table.implements(state.next_inputs, reason=reason, layout="int64")(next_inputs)
    table.implements(state.window_plan, reason=reason, layout="int64")(window_plan)
    table.implements(state.compress_plan, reason=reason, layout="int64")(compress_plan)
