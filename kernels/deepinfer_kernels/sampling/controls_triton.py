"""Masks, bans, bias and penalties on logits, and token counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_COLUMNS = 1024


@triton.jit(do_not_specialize=["count"])
def _allow(logits_ptr, allowed_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    allowed = tl.load(allowed_ptr + at, mask=inside, other=1) != 0
    tl.store(logits_ptr + at, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside & ~allowed)


@triton.jit(do_not_specialize=["count"])
def _ban(logits_ptr, rows_ptr, ids_ptr, count, vocab, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + at, mask=at < count, other=-1)
    token = tl.load(ids_ptr + at, mask=at < count, other=0)
    removed = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * vocab + token, removed, mask=row >= 0)


@triton.jit(do_not_specialize=["count"])
def _add_bias(logits_ptr, rows_ptr, ids_ptr, values_ptr, count, vocab, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + at, mask=at < count, other=-1)
    token = tl.load(ids_ptr + at, mask=at < count, other=0)
    value = tl.load(values_ptr + at, mask=at < count, other=0.0)
    logits = tl.load(logits_ptr + row * vocab + token, mask=row >= 0, other=0.0)
    tl.store(logits_ptr + row * vocab + token, logits + value, mask=row >= 0)


@triton.jit
def _penalise(
    logits_ptr, repetition_ptr, presence_ptr, frequency_ptr, slots_ptr, counts_ptr, seen_ptr,
    pending_ptr, num_pending, vocab, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < vocab
        logits = tl.load(logits_ptr + row * vocab + column, mask=inside, other=0.0)
        count = tl.load(counts_ptr + slot * vocab + column, mask=inside, other=0)
        for place in range(num_pending):
            token = tl.load(pending_ptr + row * num_pending + place)
            count += (column == token).to(tl.int32)
        in_prompt = tl.load(seen_ptr + slot * vocab + column, mask=inside, other=0) != 0
        was_output = count > 0
        repetition = tl.load(repetition_ptr + row)
        divided = tl.div_rn(logits, tl.zeros([COLUMNS], tl.float32) + repetition)
        repeated = tl.where(logits > 0, divided, logits * repetition)
        logits = tl.where(was_output | in_prompt, repeated, logits)
        logits = logits - count.to(tl.float32) * tl.load(frequency_ptr + row)
        logits = logits - tl.where(was_output, tl.load(presence_ptr + row), 0.0)
        tl.store(logits_ptr + row * vocab + column, logits, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _count(ids_ptr, slots_ptr, counts_ptr, count, vocab, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + at, mask=at < count, other=-1)
    token = tl.load(ids_ptr + at, mask=at < count, other=0)
    one = tl.full([BLOCK], 1, tl.int32)
    # Integers: the order of the additions does not matter.
    tl.atomic_add(counts_ptr + slot * vocab + token, one, mask=slot >= 0)


def allow(logits: Tensor, allowed: Tensor) -> None:
    """Remove tokens: logits [N, V] fp32 become -inf where `allowed` [N, V] bool is False."""
    if logits.numel():
        _allow[(triton.cdiv(logits.numel(), _COLUMNS),)](
            logits, allowed.contiguous(), logits.numel(), BLOCK=_COLUMNS
        )


def ban(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Remove tokens: logits [N, V] fp32 become -inf at (rows, ids) [B] int64; row -1 skips."""
    if rows.numel():
        _ban[(triton.cdiv(rows.numel(), 128),)](
            logits, rows.contiguous(), ids.contiguous(), rows.numel(), logits.shape[1], BLOCK=128
        )


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values [B] fp32 to logits [N, V] at distinct (rows, ids) [B] int64; row -1 skips."""
    if rows.numel():
        _add_bias[(triton.cdiv(rows.numel(), 128),)](
            logits, rows.contiguous(), ids.contiguous(), values.contiguous(), rows.numel(),
            logits.shape[1], BLOCK=128,
        )  # fmt: skip


def penalise(
    logits: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    slots: Tensor,
    output_counts: Tensor,
    prompt_seen: Tensor,
    pending: Tensor,
) -> None:
    """Repetition, then frequency and presence penalties; changes logits [N, V] in place.

    Args:
        logits: [N, V] fp32.
        repetition: [N] fp32 above 0.
        presence: [N] fp32.
        frequency: [N] fp32.
        slots: [N] int64 row of the counts; -1: no penalties.
        output_counts: [S, V] int32.
        prompt_seen: [S, V] bool.
        pending: [N, P] int64 tokens that count as output too; -1 none.
    """
    if logits.numel():
        columns = min(_COLUMNS, triton.next_power_of_2(logits.shape[1]))
        _penalise[(logits.shape[0], triton.cdiv(logits.shape[1], columns))](
            logits, repetition.contiguous(), presence.contiguous(), frequency.contiguous(),
            slots.contiguous(), output_counts, prompt_seen, pending.contiguous(), pending.shape[1],
            logits.shape[1], COLUMNS=columns,
        )  # fmt: skip


def count_tokens(ids: Tensor, slots: Tensor, output_counts: Tensor) -> None:
    """Add 1 to output_counts [S, V] int32 at (slots, ids) [n] int64; slot -1 skips."""
    if ids.numel():
        _count[(triton.cdiv(ids.numel(), 128),)](
            ids.contiguous(), slots.contiguous(), output_counts, ids.numel(),
            output_counts.shape[1], BLOCK=128,
        )  # fmt: skip


def penalise_truth(
    logits: Tensor, repetition: float, presence: float, frequency: float, counts: Tensor,
    seen: Tensor,
) -> Tensor:  # fmt: skip
    """Penalties on one row [V], in plain torch."""
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where(seen | (counts > 0), repeated, logits)
    return changed - counts * frequency - (counts > 0) * presence


_PAIRS = {"logits_ptr": "*fp32", "rows_ptr": "*i64", "ids_ptr": "*i64"}
COMPILE_CASES = (
    CompileCase(
        "_allow", {"logits_ptr": "*fp32", "allowed_ptr": "*i1", "count": "i32"},
        {"BLOCK": _COLUMNS},
    ),
    CompileCase("_ban", {**_PAIRS, "count": "i32", "vocab": "i32"}, {"BLOCK": 128}),
    CompileCase(
        "_add_bias", {**_PAIRS, "values_ptr": "*fp32", "count": "i32", "vocab": "i32"},
        {"BLOCK": 128},
    ),
    CompileCase(
        "_penalise",
        {
            "logits_ptr": "*fp32", "repetition_ptr": "*fp32", "presence_ptr": "*fp32",
            "frequency_ptr": "*fp32", "slots_ptr": "*i64", "counts_ptr": "*i32",
            "seen_ptr": "*i1", "pending_ptr": "*i64", "num_pending": "i32", "vocab": "i32",
        },
        {"COLUMNS": _COLUMNS},
    ),
    CompileCase(
        "_count",
        {
            "ids_ptr": "*i64", "slots_ptr": "*i64", "counts_ptr": "*i32", "count": "i32",
            "vocab": "i32",
        },
        {"BLOCK": 128},
    ),
)  # fmt: skip
