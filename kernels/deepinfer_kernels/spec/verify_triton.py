"""Verification of drafts: which are accepted, and the token after them.

Two launches on filtered logits. The first asks every draft of every request at once, so that a
request's drafts do not wait for each other; the second, a program for each request, finds the
first draft that was refused and draws the token there. Nothing is read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.sampling.philox_triton import philox_uniform
from deepinfer_kernels.sampling.sample_triton import gumbel

_COLUMNS = 4096
_WARPS = 8
_SAMPLE = tl.constexpr(0)
_ACCEPT = tl.constexpr(2)
_RESIDUAL = tl.constexpr(3)
_BONUS = tl.constexpr(4)


@triton.jit
def _total(row_ptr, divisor, vocab, COLUMNS: tl.constexpr):
    """Largest value of a row divided by `divisor`, and the sum of exp(value - largest)."""
    offset = tl.arange(0, COLUMNS)
    top = tl.full([COLUMNS], float("-inf"), tl.float32)
    for start in range(0, vocab, COLUMNS):
        inside = start + offset < vocab
        value = tl.load(row_ptr + start + offset, mask=inside, other=float("-inf"))
        top = tl.maximum(top, value)
    best = tl.max(top, axis=0) / divisor
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocab, COLUMNS):
        inside = start + offset < vocab
        value = tl.load(row_ptr + start + offset, mask=inside, other=float("-inf"))
        total += tl.where(inside, tl.exp(value / divisor - best), 0.0)
    return best, tl.sum(total, axis=0)


@triton.jit
def _accept(
    z_ptr, temperature_ptr, seeds_ptr, samples_ptr, positions_ptr, starts_ptr, ids_ptr,
    draft_logits_ptr, accepted_ptr, num_drafts, vocab, CERTAIN: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    first = tl.load(starts_ptr + seq)
    token = tl.load(ids_ptr + seq * num_drafts + place)
    # -1: no draft; 0: refused; 1: accepted.
    verdict = -1
    if (place + 1 < tl.load(starts_ptr + seq + 1) - first) & (token >= 0):
        row = first + place
        best, total = _total(z_ptr + row * vocab, 1.0, vocab, COLUMNS)
        target = tl.exp(tl.load(z_ptr + row * vocab + token) - best) / total
        temperature = tl.load(temperature_ptr + row)
        u = tl.max(
            philox_uniform(
                tl.load(seeds_ptr + row), tl.load(samples_ptr + row), tl.load(positions_ptr + row),
                place * 0 + _ACCEPT, tl.zeros([1], tl.int32),
            ),
            axis=0,
        )  # fmt: skip
        proposed = 1.0
        if not CERTAIN:  # noqa: SIM102 -- one is known when the kernel is compiled
            if temperature > 0.0:
                base = draft_logits_ptr + (seq * num_drafts + place) * vocab
                best, total = _total(base, temperature, vocab, COLUMNS)
                proposed = tl.exp(tl.load(base + token) / temperature - best) / total
        verdict = (u * proposed < target).to(tl.int32)
    tl.store(accepted_ptr + seq * num_drafts + place, verdict)


@triton.jit
def _settle(
    z_ptr, temperature_ptr, seeds_ptr, samples_ptr, positions_ptr, starts_ptr, ids_ptr,
    draft_logits_ptr, verdicts_ptr, tokens_ptr, num_accepted_ptr, num_rows, num_drafts, vocab,
    CERTAIN: tl.constexpr, DRAFTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(starts_ptr + seq)
    there = tl.load(starts_ptr + seq + 1) > first
    place = tl.arange(0, DRAFTS)
    verdict = tl.load(verdicts_ptr + seq * num_drafts + place, mask=place < num_drafts, other=-1)
    accepted = tl.min(tl.where(verdict == 1, num_drafts, place), axis=0)
    accepted = tl.minimum(accepted, num_drafts)
    refused = tl.max(tl.where((place == accepted) & (verdict == 0), 1, 0), axis=0) > 0
    refused = refused & (accepted < num_drafts)
    row = tl.minimum(first + accepted, num_rows - 1)
    base = z_ptr + row * vocab
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seeds_ptr + row)
    sample = tl.load(samples_ptr + row)
    position = tl.load(positions_ptr + row)
    purpose = tl.where(refused, _RESIDUAL, tl.where(accepted > 0, _BONUS, _SAMPLE))
    last = tl.minimum(accepted, num_drafts - 1)
    draft = tl.load(ids_ptr + seq * num_drafts + last)
    drafted = draft_logits_ptr + (seq * num_drafts + last) * vocab
    best, total = _total(base, 1.0, vocab, COLUMNS)
    draft_best = 0.0
    draft_total = 1.0
    drawn = False
    if not CERTAIN:
        drawn = refused & (temperature > 0.0)
        if drawn:
            draft_best, draft_total = _total(drafted, temperature, vocab, COLUMNS)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    offset = tl.arange(0, COLUMNS)
    value = tl.full([COLUMNS], float("-inf"), tl.float32)
    where = tl.zeros([COLUMNS], tl.int32)
    left = tl.full([COLUMNS], float("-inf"), tl.float32)
    left_where = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, vocab, COLUMNS):
        column = start + offset
        inside = column < vocab
        z = tl.load(base + column, mask=inside, other=float("-inf"))
        noise = gumbel(philox_uniform(seed, sample, position, purpose, column))
        noise = tl.where(temperature > 0.0, noise, 0.0)
        plain = z + noise
        better = plain > value
        value = tl.where(better, plain, value)
        where = tl.where(better, column, where)
        if refused:
            q = tl.where(column == draft, 1.0, 0.0)
            if not CERTAIN:  # noqa: SIM102 -- as above
                if drawn:
                    d = tl.load(drafted + column, mask=inside, other=float("-inf"))
                    q = tl.exp(d / divisor - draft_best) / draft_total
            share = tl.where(inside, tl.exp(z - best) / total - q, 0.0)
            some = share > 0.0
            score = tl.where(some, tl.log(tl.where(some, share, 1.0)) + noise, float("-inf"))
            better = score > left
            left = tl.where(better, score, left)
            left_where = tl.where(better, column, left_where)
    top = tl.max(value, axis=0)
    token = tl.min(tl.where(value == top, where, 0x7FFFFFFF), axis=0)
    token = tl.where(token == 0x7FFFFFFF, 0, token)  # a row of NaN
    left_top = tl.max(left, axis=0)
    rest = tl.min(tl.where(left == left_top, left_where, 0x7FFFFFFF), axis=0)
    token = tl.where(left_top > float("-inf"), rest, token).to(tl.int64)
    out = tokens_ptr + seq * (num_drafts + 1)
    ids = tl.load(ids_ptr + seq * num_drafts + place, mask=place < num_drafts, other=-1)
    kept = tl.where(place < accepted, ids, tl.where(place == accepted, token, -1))
    kept = tl.where(there, kept, -1)
    tl.store(out + place, kept, mask=place < num_drafts)
    tl.store(out + num_drafts, tl.where(there & (accepted == num_drafts), token, -1))
    tl.store(num_accepted_ptr + seq, accepted.to(tl.int64))


def verify_drafts(
    filtered: Tensor,
    *,
    temperature: Tensor,
    seeds: Tensor,
    sample_index: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Accepted drafts of each request and the token after them.

    Args:
        filtered: [N, V] fp32 from `filter_logits`.
        temperature: [N] fp32; 0 takes the maximum.
        seeds: [N] int64.
        sample_index: [N] int64.
        positions: [N] int64.
        query_starts: [R + 1] int64 first row of each request.
        draft_ids: [R, D] int64, D >= 1; -1 none.
        draft_logits: [R, D, V] fp32 that the drafts were drawn from; None: they are certain.

    Returns:
        Tokens [R, 1 + D] int64 with -1 behind the last, and accepted drafts [R] int64.
    """
    num_seqs, num_drafts = draft_ids.shape
    num_rows, vocab = filtered.shape
    tokens = draft_ids.new_full((num_seqs, 1 + num_drafts), -1)
    num_accepted = draft_ids.new_zeros(num_seqs)
    if num_seqs == 0 or num_rows == 0:
        return tokens, num_accepted
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(vocab)))
    block = {"COLUMNS": columns, "num_warps": _WARPS if columns == _COLUMNS else 4}
    certain = draft_logits is None
    drafted = filtered if draft_logits is None else draft_logits.contiguous()
    rows = tuple(x.contiguous() for x in (temperature, seeds, sample_index, positions))
    starts, ids = query_starts.contiguous(), draft_ids.contiguous()
    verdicts = torch.empty((num_seqs, num_drafts), dtype=torch.int32, device=ids.device)
    _accept[(num_seqs, num_drafts)](
        filtered, *rows, starts, ids, drafted, verdicts, num_drafts, vocab, CERTAIN=certain, **block
    )
    _settle[(num_seqs,)](
        filtered, *rows, starts, ids, drafted, verdicts, tokens, num_accepted, num_rows,
        num_drafts, vocab, CERTAIN=certain, DRAFTS=triton.next_power_of_2(num_drafts), **block,
    )  # fmt: skip
    return tokens, num_accepted


def accepted_truth(
    target: Tensor, drafter: Tensor, uniforms: list[float], draft_ids: list[int]
) -> int:
    """Accepted drafts of one request, from probabilities [D, V] and acceptance numbers [D]."""
    for place, token in enumerate(draft_ids):
        if not uniforms[place] * float(drafter[place, token]) < float(target[place, token]):
            return place
    return len(draft_ids)


_ROWS = {
    "z_ptr": "*fp32", "temperature_ptr": "*fp32", "seeds_ptr": "*i64", "samples_ptr": "*i64",
    "positions_ptr": "*i64", "starts_ptr": "*i64", "ids_ptr": "*i64", "draft_logits_ptr": "*fp32",
}  # fmt: skip
COMPILE_CASES = (
    CompileCase(
        "_accept",
        {**_ROWS, "accepted_ptr": "*i32", "num_drafts": "i32", "vocab": "i32"},
        {"CERTAIN": False, "COLUMNS": _COLUMNS},
        num_warps=_WARPS,
    ),
    CompileCase(
        "_settle",
        {
            **_ROWS, "verdicts_ptr": "*i32", "tokens_ptr": "*i64", "num_accepted_ptr": "*i64",
            "num_rows": "i32", "num_drafts": "i32", "vocab": "i32",
        },
        {"CERTAIN": False, "DRAFTS": 8, "COLUMNS": _COLUMNS},
        num_warps=_WARPS,
    ),
)  # fmt: skip
