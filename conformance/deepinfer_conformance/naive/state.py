"""Truths of the state family: requests walked through one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.ops.state import (
    CompressPlan,
    NextInputs,
    RowLayout,
    StepInputs,
    StepResults,
    WindowPlan,
)
from deepinfer.device.runtime import StepKind


def _index(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def row_layout(query_lens: Tensor, context_lens: Tensor, num_rows: int) -> RowLayout:
    """Request by request, then padding."""
    seqs, offsets, positions, starts = [], [], [], [0]
    for seq, (length, done) in enumerate(
        zip(query_lens.tolist(), context_lens.tolist(), strict=True)
    ):
        for offset in range(length):
            seqs.append(seq)
            offsets.append(offset)
            positions.append(done + offset)
        starts.append(starts[-1] + length)
    num_valid = len(seqs)
    padding = num_rows - num_valid
    seqs += [len(query_lens) - 1] * padding
    return RowLayout(
        _index(seqs),
        _index(offsets + [0] * padding),
        _index(positions + [0] * padding),
        torch.tensor([row < num_valid for row in range(num_rows)], dtype=torch.bool),
        _index(starts),
    )


def correct_inputs(
    host: StepInputs, draft_ids: Tensor, limits: Tensor, remap: Tensor, results: StepResults
) -> StepInputs:
    """Request by request: what it goes on from, then its tokens."""
    tokens, query_lens, context_lens, history = [], [], [], []
    for seq, (length, q) in enumerate(zip(host.query_lens.tolist(), remap.tolist(), strict=True)):
        fed = host.input_ids.tolist()[seq : seq + 1]
        context, before = int(host.context_lens[seq]), host.history[seq].tolist()
        if q >= 0:
            fed = [results.token_ids[q].tolist()[int(results.num_accepted[q])]]
            context, before = int(results.context_lens[q]), results.history[q].tolist()
        drafts = draft_ids[seq].tolist()
        drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        length = max(0, min(length, 1 + len(drafts), int(limits[seq]) - context))
        tokens += [*fed, *drafts][:length]
        query_lens.append(length)
        context_lens.append(context)
        history.append(before)
    padding = [0] * (host.input_ids.shape[0] - len(tokens))
    return StepInputs(
        _index(tokens + padding),
        _index(query_lens),
        _index(context_lens),
        torch.tensor(history, dtype=torch.int64).view_as(host.history),
    )


def next_inputs(
    inputs: StepInputs, seqs: Tensor, num_accepted: Tensor, *, kind: StepKind
) -> NextInputs:
    """The tokens that stay, appended to the history before them."""
    context_lens, history = [], []
    for seq, accepted in zip(seqs.tolist(), num_accepted.tolist(), strict=True):
        first, length = int(inputs.query_lens[:seq].sum()), int(inputs.query_lens[seq])
        kept = min(length, 1 + accepted) if kind is StepKind.DECODE else length
        past = inputs.history[seq].tolist() + inputs.input_ids.tolist()[first : first + kept]
        context_lens.append(int(inputs.context_lens[seq]) + kept)
        history.append(past[kept:])
    shape = (len(context_lens), inputs.history.shape[1])
    return NextInputs(_index(context_lens), torch.tensor(history, dtype=torch.int64).view(shape))


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
    """Row by row, window position by window position."""
    prefill = kind is StepKind.PREFILL
    num_rows = rows.positions.shape[0]
    write = [-1] * num_rows
    read = [[-1] * window for _ in range(num_rows)]
    commit_to = [-1] * num_rows
    history: list[tuple[int, int]] = []
    workspace, row = 0, 0
    for seq, (length, done, slot) in enumerate(
        zip(query_lens.tolist(), context_lens.tolist(), seq_slots.tolist(), strict=True)
    ):
        chunk = workspace + window - 1
        place = {done + at: chunk + at for at in range(1 - window, length)}
        in_ring = {p: slot * ring + p % ring for p in range(max(0, done - ring), done + length)}
        for position in range(done - window + 1, done):
            present = position >= 0 and length > 0
            pair = (slot * ring + position % ring, place[position]) if present else (-1, -1)
            history.append(pair)
        for position in range(done, done + length):
            write[row] = place[position] if prefill else in_ring[position]
            if position >= done + length - ring:
                commit_to[row] = in_ring[position]
            for at in range(window):
                key = position - window + 1 + at
                if key >= int(floors[seq]):
                    read[row][at] = place[key] if prefill else slot * ring + key % ring
            row += 1
        workspace = chunk + length
    commit = [w if to >= 0 else -1 for w, to in zip(write, commit_to, strict=True)]
    return WindowPlan(
        _index(write),
        torch.tensor(read, dtype=torch.int64).view(num_rows, window),
        _index([pair[0] for pair in history] if prefill else []),
        _index([pair[1] for pair in history] if prefill else []),
        _index(commit if prefill else []),
        _index(commit_to if prefill else []),
    )


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
    """Row by row; no padding entries."""
    per_block = block_size // ratio
    emitted: list[tuple[int, int, int, int]] = []
    visible, previous, read, write = [], [], [], []
    for row, (seq, offset, position, valid) in enumerate(
        zip(
            rows.row_seq.tolist(),
            rows.row_offset.tolist(),
            rows.positions.tolist(),
            rows.valid.tolist(),
            strict=True,
        )
    ):
        slot = int(seq_slots[seq]) * pending_ring
        last = offset >= int(query_lens[seq]) - pending_ring
        visible.append((position + 1) // ratio if valid else 0)
        previous.append(row - 1 if offset > 0 else -1)
        read.append(slot + (position - 1) % pending_ring)
        write.append(slot + position % pending_ring if valid and last else -1)
        if valid and (position + 1) % ratio == 0:
            entry = position // ratio
            cache_row = int(block_table[seq, entry // per_block]) * per_block + entry % per_block
            emitted.append((row, entry, entry * ratio, cache_row))
    emit_rows, entries, positions, slots = (
        _index([item[at] for item in emitted]) for at in range(4)
    )
    carried = (_index(values if ratio > 1 else []) for values in (previous, read, write))
    previous_row, ring_read, ring_write = carried
    return CompressPlan(
        emit_rows,
        entries,
        positions,
        slots,
        _index(visible),
        previous_row,
        ring_read,
        ring_write,
    )
