"""Correcting a step's inputs on the device by results that the host has not seen yet.

Integers only, one launch each. The requests of a step fit into one block, so that every program
finds the prefix sums of the corrected lengths itself.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_ROWS = 16


class Inputs(NamedTuple):
    """Tokens [T], query and context lengths [R], tokens before each request [R, H]; int64."""

    input_ids: Tensor
    query_lens: Tensor
    context_lens: Tensor
    history: Tensor


class Results(NamedTuple):
    """Tokens [Q, 1 + W], accepted drafts [Q], next context [Q], history [Q, H]; int64."""

    token_ids: Tensor
    num_accepted: Tensor
    context_lens: Tensor
    history: Tensor


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _correct(
    ids_ptr, query_lens_ptr, context_lens_ptr, history_ptr, drafts_ptr, limits_ptr, remap_ptr,
    tokens_ptr, accepted_ptr, next_context_ptr, next_history_ptr, out_ids_ptr, out_query_ptr,
    out_context_ptr, out_history_ptr, num_rows, num_seqs, num_drafts, width, history_len,
    ROWS: tl.constexpr, SEQS: tl.constexpr, DRAFTS: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    seq = tl.arange(0, SEQS)
    there = seq < num_seqs
    remap = tl.load(remap_ptr + seq, mask=there, other=-1)
    follows = there & (remap >= 0)
    planned = tl.load(query_lens_ptr + seq, mask=there, other=0)
    context = tl.load(context_lens_ptr + seq, mask=there & (remap < 0), other=0)
    context += tl.load(next_context_ptr + remap, mask=follows, other=0)
    room = tl.load(limits_ptr + seq, mask=there, other=0) - context
    place = tl.arange(0, DRAFTS)[None, :]
    drafts = tl.load(
        drafts_ptr + seq[:, None] * num_drafts + place,
        mask=there[:, None] & (place < num_drafts),
        other=-1,
    )
    num_tokens = 1 + tl.min(tl.where(drafts < 0, place, num_drafts), axis=1)
    lens = tl.minimum(tl.minimum(planned, num_tokens), tl.maximum(room, 0))
    ends = tl.cumsum(lens, axis=0)
    if tl.program_id(0) == 0:
        tl.store(out_query_ptr + seq, lens, mask=there)
        tl.store(out_context_ptr + seq, context, mask=there)
        column = tl.arange(0, HISTORY)[None, :]
        inside = column < history_len
        own = tl.load(
            history_ptr + seq[:, None] * history_len + column,
            mask=(there & (remap < 0))[:, None] & inside,
            other=0,
        )
        own += tl.load(
            next_history_ptr + remap[:, None] * history_len + column,
            mask=follows[:, None] & inside,
            other=0,
        )
        out = out_history_ptr + seq[:, None] * history_len + column
        tl.store(out, own, mask=there[:, None] & inside)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    valid = inside & (row < tl.sum(lens, axis=0))
    passed = (ends[None, :] <= row[:, None]) & there[None, :]
    owner = tl.sum(passed.to(tl.int32), axis=1)
    mine = seq[None, :] == owner[:, None]
    offset = row - tl.sum(tl.where(mine, (ends - lens)[None, :], 0), axis=1)
    source = tl.sum(tl.where(mine, remap[None, :], 0), axis=1)
    # A newcomer's first token stands at the place of its request.
    host = tl.load(ids_ptr + owner, mask=valid & (offset == 0) & (source < 0), other=0)
    newest = valid & (offset == 0) & (source >= 0)
    taken = tl.load(accepted_ptr + source, mask=newest, other=0)
    token = tl.load(tokens_ptr + source * width + taken, mask=newest, other=0)
    is_draft = valid & (offset > 0)
    drafted = tl.load(drafts_ptr + owner * num_drafts + offset - 1, mask=is_draft, other=0)
    tl.store(out_ids_ptr + row, host + token + drafted, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _next(
    ids_ptr, query_lens_ptr, context_lens_ptr, history_ptr, seqs_ptr, accepted_ptr,
    out_context_ptr, out_history_ptr, num_rows, num_seqs, history_len,
    DECODES: tl.constexpr, SEQS: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    seq = tl.load(seqs_ptr + at)
    other = tl.arange(0, SEQS)
    lens = tl.load(query_lens_ptr + other, mask=(other < num_seqs) & (other < seq), other=0)
    start = tl.sum(lens, axis=0)
    kept = tl.load(query_lens_ptr + seq)
    if DECODES:
        kept = tl.minimum(kept, 1 + tl.load(accepted_ptr + at))
    column = tl.arange(0, HISTORY)
    inside = column < history_len
    # Offset of each history token from the request's first row; negative: from before the step.
    offset = kept + column - history_len
    before = tl.load(
        history_ptr + seq * history_len + history_len + offset,
        mask=inside & (offset < 0),
        other=0,
    )
    inside_step = inside & (offset >= 0) & (start + offset < num_rows)
    own = tl.load(ids_ptr + start + offset, mask=inside_step, other=0)
    tl.store(out_history_ptr + at * history_len + column, before + own, mask=inside)
    tl.store(out_context_ptr + at, tl.load(context_lens_ptr + seq) + kept)


def correct_inputs(
    host: Inputs, draft_ids: Tensor, limits: Tensor, remap: Tensor, results: Results
) -> Inputs:
    """The true inputs of a decode step that was built before what it goes on from was known.

    Args:
        host: planned inputs; of requests that follow a result only the query length counts, and
            a newcomer's first token stands at the place of its request.
        draft_ids: [R, D] int64 drafts of each request; -1 and what follows: none.
        limits: [R] int64 positions that may be computed at all.
        remap: [R] int64 row of `results` that a request goes on from; -1: the host's numbers.
        results: Q rows.

    Returns:
        The inputs, tokens laid out anew by the corrected lengths, padded with 0.
    """
    host = Inputs(*(tensor.contiguous() for tensor in host))
    results = Results(*(tensor.contiguous() for tensor in results))
    out = Inputs(*(torch.empty_like(tensor) for tensor in host))
    num_rows, num_seqs = host.input_ids.shape[0], host.query_lens.shape[0]
    num_drafts, history_len = draft_ids.shape[1], host.history.shape[1]
    _correct[(max(1, triton.cdiv(num_rows, _ROWS)),)](
        *host, draft_ids.contiguous(), limits.contiguous(), remap.contiguous(), *results, *out,
        num_rows, num_seqs, num_drafts, results.token_ids.shape[1], history_len, ROWS=_ROWS,
        SEQS=triton.next_power_of_2(num_seqs), DRAFTS=triton.next_power_of_2(max(1, num_drafts)),
        HISTORY=triton.next_power_of_2(history_len),
    )  # fmt: skip
    return out


def next_inputs(
    inputs: Inputs, seqs: Tensor, num_accepted: Tensor, *, decodes: bool
) -> tuple[Tensor, Tensor]:
    """Context [N] and history [N, H] of the next step of the requests that sampled.

    Args:
        inputs: the step's true inputs.
        seqs: [N] int64 requests.
        num_accepted: [N] int64 accepted drafts of each.
        decodes: of a request's rows only the token and its accepted drafts stay.
    """
    inputs = Inputs(*(tensor.contiguous() for tensor in inputs))
    history_len = inputs.history.shape[1]
    contexts = seqs.new_empty(seqs.shape[0])
    history = seqs.new_empty((seqs.shape[0], history_len))
    num_seqs = inputs.query_lens.shape[0]
    if seqs.shape[0]:
        _next[(seqs.shape[0],)](
            *inputs, seqs.contiguous(), num_accepted.contiguous(), contexts, history,
            inputs.input_ids.shape[0], num_seqs, history_len, DECODES=decodes,
            SEQS=triton.next_power_of_2(num_seqs), HISTORY=triton.next_power_of_2(history_len),
            num_warps=1,
        )  # fmt: skip
    return contexts, history


def correct_inputs_truth(
    host: Inputs, draft_ids: Tensor, limits: list[int], remap: list[int], results: Results
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """`correct_inputs` as a loop: tokens without padding, query lengths, contexts, histories."""
    tokens: list[int] = []
    lens, contexts, histories = [], [], []
    for seq, source in enumerate(remap):
        planned, first = int(host.query_lens[seq]), int(host.input_ids[seq])
        context, history = int(host.context_lens[seq]), host.history[seq].tolist()
        if source >= 0:
            context, history = int(results.context_lens[source]), results.history[source].tolist()
            first = int(results.token_ids[source, results.num_accepted[source]])
        drafts = itertools.takewhile(lambda token: token >= 0, draft_ids[seq].tolist())
        own = [first, *drafts]
        length = min(planned, len(own), max(0, limits[seq] - context))
        tokens += own[:length]
        lens.append(length)
        contexts.append(context)
        histories.append(history)
    return tokens, lens, contexts, histories


def next_inputs_truth(
    inputs: Inputs, seq: int, num_accepted: int, *, decodes: bool
) -> tuple[int, list[int]]:
    """Context and history of one request's next step, as lists."""
    start = int(inputs.query_lens[:seq].sum())
    length = int(inputs.query_lens[seq])
    kept = min(length, 1 + num_accepted) if decodes else length
    known = inputs.history[seq].tolist() + inputs.input_ids[start : start + kept].tolist()
    return int(inputs.context_lens[seq]) + kept, known[len(known) - inputs.history.shape[1] :]


def _int64(*names: str) -> dict[str, str]:
    return dict.fromkeys((f"{name}_ptr" for name in names), "*i64")


_INPUTS = _int64("ids", "query_lens", "context_lens", "history")
COMPILE_CASES = (
    CompileCase(
        "_correct",
        {
            **_INPUTS,
            **_int64(
                "drafts", "limits", "remap", "tokens", "accepted", "next_context", "next_history",
                "out_ids", "out_query", "out_context", "out_history",
            ),
            "num_rows": "i32", "num_seqs": "i32", "num_drafts": "i32", "width": "i32",
            "history_len": "i32",
        },
        {"ROWS": _ROWS, "SEQS": 256, "DRAFTS": 8, "HISTORY": 2},
    ),
    CompileCase(
        "_next",
        {
            **_INPUTS, **_int64("seqs", "accepted", "out_context", "out_history"),
            "num_rows": "i32", "num_seqs": "i32", "history_len": "i32",
        },
        {"DECODES": True, "SEQS": 256, "HISTORY": 2},
        num_warps=1,
    ),
)  # fmt: skip
