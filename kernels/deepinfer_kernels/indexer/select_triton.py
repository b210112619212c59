"""Choosing the best columns of each row by a radix search, in ascending order of index.

Scores become unsigned keys of the same order. A row that fits stays in registers, and the k-th
key is found bit by bit; of a longer one, four passes find it eight bits at a time. Then every
column above it is written, and of the equal ones the lowest, so that the result does not depend
on how the row was read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_COLUMNS = 1024
# Columns and warps of the programs for rows that fit: few sizes, because each is compiled.
_WHOLE_ROWS = {2048: 8, 8192: 16, 32768: 16}
# They are read again in blocks to be written: the running counts need registers of their own.
_WRITTEN = 8192
# Wide blocks keep many loads in flight.
_SELECT_COLUMNS = 2048
_SELECT_WARPS = 8


@triton.jit
def _ordered_key(score):
    """Unsigned key with the order of fp32 scores; 0 for -inf and NaN, which are not chosen."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 equals 0
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -0x80000000).to(tl.uint32, bitcast=True)
    return tl.where(score > float("-inf"), key, 0)


@triton.jit
def _write_chosen(scores_ptr, out_ptr, num_columns, kth, equal_left, COLUMNS: tl.constexpr):
    """Columns of a row whose key is above `kth`, and the first `equal_left` of the equal ones."""
    offset = tl.arange(0, COLUMNS)
    written = equal_left * 0
    for start in range(0, num_columns, COLUMNS):
        column = start + offset
        score = tl.load(scores_ptr + column, mask=column < num_columns, other=float("-inf"))
        key = _ordered_key(score)
        above = key > kth
        equal = (key == kth) & (key > 0)
        # One scan counts both: neither exceeds COLUMNS <= 2^15.
        counts = tl.cumsum((above.to(tl.int32) << 16) + equal.to(tl.int32), axis=0)
        rank = counts & 0xFFFF
        taken = above | (equal & (rank <= equal_left))
        position = written + (counts >> 16) + tl.minimum(rank, equal_left) - 1
        tl.store(out_ptr + position, column.to(tl.int64), mask=taken)
        num_equal = tl.sum(equal.to(tl.int32), axis=0)
        written += tl.sum(above.to(tl.int32), axis=0) + tl.minimum(num_equal, equal_left)
        equal_left -= tl.minimum(num_equal, equal_left)


@triton.jit(do_not_specialize=["num_columns"])
def _select_whole(
    scores_ptr, out_ptr, num_columns, k, COLUMNS: tl.constexpr, WRITTEN: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    score = tl.load(
        scores_ptr + row * num_columns + column, mask=column < num_columns, other=float("-inf")
    )
    key = _ordered_key(score)
    # The largest key that k columns reach; 0 with fewer columns than that.
    kth = tl.zeros([1], dtype=tl.uint32)
    bit = tl.full([1], 0x80000000, dtype=tl.uint32)
    for _ in range(32):
        reached = tl.sum((key >= (kth | bit)).to(tl.int32), axis=0)
        kth = tl.where(reached >= k, kth | bit, kth)
        bit = bit >> 1
    above = tl.sum((key > kth).to(tl.int32), axis=0)
    _write_chosen(
        scores_ptr + row * num_columns, out_ptr + row * k, num_columns, kth, k - above, WRITTEN
    )


@triton.jit(do_not_specialize=["num_columns"])
def _select_long(scores_ptr, out_ptr, num_columns, k, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, COLUMNS)
    digit = tl.arange(0, 256)
    # The key that k columns reach: digits from the top; `wanted` are still to be found below.
    prefix = tl.zeros([1], dtype=tl.uint32)
    wanted = tl.zeros([1], dtype=tl.int32) + k
    for place in tl.static_range(4):
        counts = tl.zeros([256], dtype=tl.int32)
        for start in range(0, num_columns, COLUMNS):
            inside = start + offset < num_columns
            score = tl.load(
                scores_ptr + row * num_columns + start + offset, mask=inside, other=float("-inf")
            )
            key = _ordered_key(score)
            same = inside & (key > 0)
            if place > 0:
                same = same & ((key >> (32 - 8 * place)) == (prefix >> (32 - 8 * place)))
            counts += tl.histogram(((key >> (24 - 8 * place)) & 255).to(tl.int32), 256, mask=same)
        # Columns with this digit or a higher one.
        at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        chosen = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
        # With fewer columns than wanted every one is taken: the lowest digit.
        chosen = tl.maximum(chosen, 0)
        wanted -= tl.sum(tl.where(digit > chosen, counts, 0), axis=0)
        prefix = prefix | (chosen.to(tl.uint32) << (24 - 8 * place))
    _write_chosen(
        scores_ptr + row * num_columns, out_ptr + row * k, num_columns, prefix, wanted, COLUMNS
    )


@triton.jit(do_not_specialize=["num_columns", "num_blocks"])
def _block_maxima(
    scores_ptr, visible_ptr, out_ptr, num_columns, num_blocks, SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    entry = tl.arange(0, SIZE_BLOCK)[None, :]
    column = block[:, None] * SIZE + entry
    scores = tl.load(
        scores_ptr + row * num_columns + column,
        mask=(entry < SIZE) & (column < num_columns),
        other=float("-inf"),
    )
    best = tl.max(scores, axis=1)
    visible = tl.load(visible_ptr + row)
    newest = (visible > 0) & (block == (visible - 1) // SIZE)
    best = tl.where(newest, float("inf"), best)
    tl.store(out_ptr + row * num_blocks + block, best, mask=block < num_blocks)


@triton.jit(do_not_specialize=["count", "per_row", "num_blocks"])
def _mark(candidates_ptr, marks_ptr, count, per_row, num_blocks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    candidate = tl.load(candidates_ptr + at, mask=at < count, other=-1)
    mark = marks_ptr + at // per_row * num_blocks + candidate
    tl.store(mark, tl.full([BLOCK], 1, dtype=tl.uint8), mask=candidate >= 0)


@triton.jit(do_not_specialize=["num_columns", "num_blocks"])
def _mask(scores_ptr, marks_ptr, out_ptr, num_columns, num_blocks, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    kept = tl.load(marks_ptr + row * num_blocks + column // size, mask=inside, other=0)
    score = tl.load(scores_ptr + row * num_columns + column, mask=inside, other=0.0)
    score = tl.where(kept != 0, score, float("-inf"))
    tl.store(out_ptr + row * num_columns + column, score, mask=inside)


@triton.jit
def _visible(visible_ptr, out_ptr, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK).to(tl.int64)
    visible = tl.load(visible_ptr + row)
    entry = tl.where(column < visible, column, -1)
    tl.store(out_ptr + row * k + column, entry, mask=column < k)


def select_topk(scores: Tensor, k: int) -> Tensor:
    """Indices of the k best columns, ascending, -1 padded; -inf is never chosen.

    Args:
        scores: [T, n] fp32.
        k: columns to choose.

    Returns:
        [T, k] int64; of equal scores the lowest indices.
    """
    scores = scores.contiguous()
    num_rows, num_columns = scores.shape
    out = torch.full((num_rows, k), -1, dtype=torch.int64, device=scores.device)
    if num_rows and num_columns:
        whole = next((size for size in _WHOLE_ROWS if num_columns <= size), None)
        if whole is not None:
            _select_whole[(num_rows,)](
                scores,
                out,
                num_columns,
                k,
                COLUMNS=whole,
                WRITTEN=min(whole, _WRITTEN),
                num_warps=_WHOLE_ROWS[whole],
            )
        else:
            _select_long[(num_rows,)](
                scores, out, num_columns, k, COLUMNS=_SELECT_COLUMNS, num_warps=_SELECT_WARPS
            )
    return out


def select_candidates(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """The best blocks by their best entry, the newest always; [T, num_blocks] int64.

    Args:
        scores: [T, n] fp32, -inf where not visible.
        visible: [T] int64.
        num_blocks: blocks to choose.
        block_size: entries of a block.
    """
    scores = scores.contiguous()
    num_rows, num_columns = scores.shape
    present = triton.cdiv(num_columns, block_size)
    best = torch.empty((num_rows, present), dtype=torch.float32, device=scores.device)
    if best.numel():
        _block_maxima[(num_rows, triton.cdiv(present, 64))](
            scores, visible.contiguous(), best, num_columns, present, SIZE=block_size,
            SIZE_BLOCK=triton.next_power_of_2(block_size), BLOCKS=64,
        )  # fmt: skip
    return select_topk(best, num_blocks)


def mask_candidates(scores: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    """Scores [T, n] with -inf outside the candidate blocks [T, B] (int64, -1 absent)."""
    scores, candidates = scores.contiguous(), candidates.contiguous()
    num_rows, num_columns = scores.shape
    num_blocks = triton.cdiv(num_columns, block_size)
    out = torch.empty_like(scores)
    if out.numel():
        marks = torch.zeros((num_rows, num_blocks), dtype=torch.uint8, device=scores.device)
        _mark[(triton.cdiv(candidates.numel(), _COLUMNS),)](
            candidates, marks, candidates.numel(), candidates.shape[1], num_blocks,
            BLOCK=_COLUMNS,
        )  # fmt: skip
        _mask[(num_rows, triton.cdiv(num_columns, _COLUMNS))](
            scores, marks, out, num_columns, num_blocks, block_size, BLOCK=_COLUMNS
        )
    return out


def select_visible(visible: Tensor, k: int) -> Tensor:
    """[T, k] int64: 0 .. visible - 1, then -1."""
    out = torch.empty((visible.shape[0], k), dtype=torch.int64, device=visible.device)
    if out.numel():
        _visible[(visible.shape[0],)](visible.contiguous(), out, k, BLOCK=triton.next_power_of_2(k))
    return out


def select_topk_truth(scores: Tensor, k: int) -> Tensor:
    """`select_topk` by sorting, row by row."""
    out = torch.full((scores.shape[0], k), -1, dtype=torch.int64)
    for row, values in enumerate(scores.tolist()):
        finite = [column for column, value in enumerate(values) if value > float("-inf")]
        chosen = sorted(sorted(finite, key=lambda column: -values[column])[:k])
        out[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
    return out


COMPILE_CASES = (
    *(
        CompileCase(
            "_select_whole",
            {"scores_ptr": "*fp32", "out_ptr": "*i64", "num_columns": "i32", "k": "i32"},
            {"COLUMNS": columns, "WRITTEN": min(columns, _WRITTEN)}, num_warps=warps,
        )
        for columns, warps in _WHOLE_ROWS.items()
    ),
    CompileCase(
        "_select_long",
        {"scores_ptr": "*fp32", "out_ptr": "*i64", "num_columns": "i32", "k": "i32"},
        {"COLUMNS": _SELECT_COLUMNS},
        num_warps=_SELECT_WARPS,
        max_spill_bytes=8,  # on SM100
    ),
    CompileCase(
        "_block_maxima",
        {
            "scores_ptr": "*fp32", "visible_ptr": "*i64", "out_ptr": "*fp32",
            "num_columns": "i32", "num_blocks": "i32",
        },
        {"SIZE": 8, "SIZE_BLOCK": 8, "BLOCKS": 64},
    ),
    CompileCase(
        "_mark",
        {
            "candidates_ptr": "*i64", "marks_ptr": "*u8", "count": "i32", "per_row": "i32",
            "num_blocks": "i32",
        },
        {"BLOCK": _COLUMNS},
    ),
    CompileCase(
        "_mask",
        {
            "scores_ptr": "*fp32", "marks_ptr": "*u8", "out_ptr": "*fp32", "num_columns": "i32",
            "num_blocks": "i32", "size": "i32",
        },
        {"BLOCK": _COLUMNS},
    ),
    CompileCase(
        "_visible", {"visible_ptr": "*i64", "out_ptr": "*i64", "k": "i32"}, {"BLOCK": 512}
    ),
)  # fmt: skip
