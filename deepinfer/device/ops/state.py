"""State family: everything per row that a step derives on the device from per-request numbers.

The host knows capacities and upper bounds; counts and positions live on the device, because
with steps in flight the host does not know them yet.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepinfer.device.comparison import Exact
from deepinfer.device.op import op
from deepinfer.device.runtime import StepKind

NEWCOMER = -1
"""Mark of a sequence that goes on from the host's numbers, not from a result in flight."""


class StepInputs(NamedTuple):
    """What a step is fed, as far as results of earlier steps can change it.

    Attributes:
        input_ids: [T] int64 tokens of all requests one after another, then padding of id 0.
        query_lens: [R] int64 rows of each request; sum at most T.
        context_lens: [R] int64 positions computed before this step.
        history: [R, H] int64 tokens before each request's first row, oldest first; -1 none.
    """

    input_ids: Tensor
    query_lens: Tensor
    context_lens: Tensor
    history: Tensor


class StepResults(NamedTuple):
    """Results that the host may not have seen yet, a row for each sequence that sampled.

    Attributes:
        token_ids: [Q, 1 + W] int64 accepted drafts, the token after them, then anything.
        num_accepted: [Q] int64 in [0, W].
        context_lens: [Q] int64 context of the sequence's next step.
        history: [Q, H] int64 history of its next step.
    """

    token_ids: Tensor
    num_accepted: Tensor
    context_lens: Tensor
    history: Tensor


@op(family="state", compare=Exact())
def correct_inputs(
    host: StepInputs, draft_ids: Tensor, limits: Tensor, remap: Tensor, results: StepResults
) -> StepInputs:
    """The true inputs of a decode step that the host built before it knew what it goes on from.

    For request r with q = remap[r]:
    1. a newcomer keeps its context, history and first token, input_ids[r] of the host; any other
       takes context and history from row q, and its first token is
       token_ids[q, num_accepted[q]];
    2. its further tokens are draft_ids[r] up to the first -1;
    3. query_lens[r] is host.query_lens[r], but at most limits[r] - context and the tokens that
       there are, and at least 0;
    4. the tokens of all requests, each cut to its query length, are laid out one after another.

    Args:
        host: query_lens are bounds, with a sum of at most T after step 3; the first tokens stand
            at the first R places (T >= R unless nobody is new). Context and history count for
            newcomers only.
        draft_ids: [R, D] int64 drafts of each request, in order; -1 and what follows: none.
        limits: [R] int64 positions that may be computed at all.
        remap: [R] int64 row of `results`, or NEWCOMER.
        results: Q >= 1 rows.

    Contract: everything that depends on lengths (rows, RoPE positions, cache slots, visible
    entries) is derived from the result by `row_layout` and the plans, never from the host's
    numbers. The bounds may themselves come from the device. R >= 1; T may be 0.
    Source: ZO-5, ZO-6.
    """
    raise NotImplementedError


class NextInputs(NamedTuple):
    """Where sequences stand after a step: context_lens [N] and history [N, H] of their next."""

    context_lens: Tensor
    history: Tensor


@op(family="state", compare=Exact())
def next_inputs(
    inputs: StepInputs, seqs: Tensor, num_accepted: Tensor, *, kind: StepKind
) -> NextInputs:
    """Context and history after a step, for the requests that sampled.

    Rows that stay: all of a prefill chunk; of a decode step the token and its accepted drafts,
    1 + num_accepted, and never more than the query length.

    Args:
        inputs: the step's true inputs.
        seqs: [N] int64 requests.
        num_accepted: [N] int64 accepted drafts of each.
        kind: of the step.
    """
    raise NotImplementedError


class RowLayout(NamedTuple):
    """Which request and position each row has.

    Attributes:
        row_seq: [T] int64 request of the row; padding rows belong to the last request.
        row_offset: [T] int64 index within the request's rows of this step; 0 for padding.
        positions: [T] int64 absolute position; 0 for padding.
        valid: [T] bool.
        query_starts: [R + 1] int64 prefix sums of the query lengths.
    """

    row_seq: Tensor
    row_offset: Tensor
    positions: Tensor
    valid: Tensor
    query_starts: Tensor


@op(family="state", compare=Exact())
def row_layout(query_lens: Tensor, context_lens: Tensor, num_rows: int) -> RowLayout:
    """Lay the rows of all requests out one after another.

    Args:
        query_lens: [R] int64 rows of each request in this step; sum at most `num_rows`.
        context_lens: [R] int64 positions computed before this step.
        num_rows: capacity T.
    """
    raise NotImplementedError


class WindowPlan(NamedTuple):
    """Where window rows are written, read and moved.

    Attributes:
        write: [T] int64 row to write; in the ring (decode) or the workspace (prefill).
        read: [T, W] int64 rows of positions p - W + 1 .. p; -1 absent.
        history_from: [R * (W - 1)] int64 ring rows to copy into the workspace; empty in decode.
        history_to: same length, workspace rows.
        commit_from: [T] int64 workspace rows to copy into the ring; empty in decode.
        commit_to: same length, ring rows; -1 skips.
    """

    write: Tensor
    read: Tensor
    history_from: Tensor
    history_to: Tensor
    commit_from: Tensor
    commit_to: Tensor


@op(family="state", compare=Exact())
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
    """Window rows of every row of the step.

    Args:
        rows: the row layout.
        query_lens: [R] int64.
        context_lens: [R] int64.
        seq_slots: [R] int64 ring of each request: rows slot * ring + position % ring.
        floors: [R] int64 first position whose window row may be read (0, or a replay start).
        kind: PREFILL works in a workspace (history of W - 1 rows, then the chunk, request by
            request) and commits the last `ring` rows of each chunk; DECODE works in the ring.
        window: W, the token itself included.
        ring: rows of a ring; at least W plus what may be in flight.

    Returns:
        The plan; padding rows write nowhere and read nothing.
    """
    raise NotImplementedError


class CompressPlan(NamedTuple):
    """What a KV source of one ratio emits in this step.

    Attributes:
        emit_rows: [E] int64 rows that complete an entry; -1 padding.
        entries: [E] int64 index of the completed entry; 0 for padding.
        positions: [E] int64 RoPE position, first token of the entry's group; 0 for padding.
        slots: [E] int64 cache row; -1 for padding.
        visible: [T] int64 entries each row may see, this step's included.
        previous_row: [T] int64 row of the position before, or -1 (empty for ratio 1).
        ring_read: [T] int64 pending-row ring position of the token before (empty for ratio 1).
        ring_write: [T] int64 pending-row ring position to write; -1 skips (empty for ratio 1).
    """

    emit_rows: Tensor
    entries: Tensor
    positions: Tensor
    slots: Tensor
    visible: Tensor
    previous_row: Tensor
    ring_read: Tensor
    ring_write: Tensor


@op(family="state", compare=Exact())
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
    """Entries that a step completes for sources of `ratio`.

    Args:
        rows: the row layout.
        query_lens: [R] int64.
        seq_slots: [R] int64 persistent slot of each request.
        block_table: [R, max_blocks] int64 cache blocks of `block_size` tokens.
        ratio: 1 or 2 tokens per entry.
        block_size: tokens per block, a multiple of ratio.
        pending_ring: rows of each request's ring of raw (value, gate) rows; ring row of
            position p is slot * pending_ring + p % pending_ring, and only the last
            `pending_ring` positions of a step are written.
    """
    raise NotImplementedError
