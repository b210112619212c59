"""Scores of index queries against the index keys of every visible entry, through block tables.

Keys are the left operand of products: a program walks over entries of one row (decode), with the
next records on their way, or over rows of one request (prefill), which share dequantised keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.kv.records_triton import load_fp4

_ENTRIES = 64
_HEADS = 32
"""Heads of one product; 64 need more registers than there are."""
_WARPS = 4
_ROWS = 8
"""Rows of a program, where requests have many: they share keys."""
_MAX_TILES = 8
_PROGRAMS = 512
"""A program takes several tiles of entries, up to _MAX_TILES, only beyond so many programs."""
_FP32_ENTRIES = 64


@triton.jit
def _round_bf16(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _slots(table_ptr, seq, entry, seen, max_blocks, per_block):
    """Cache rows of entries, and whether there are any."""
    block = tl.load(table_ptr + seq * max_blocks + entry // per_block, mask=seen, other=-1)
    return block * per_block + entry % per_block, seen & (block >= 0)


@triton.jit
def _score_keys(
    q_ptr, weights_ptr, row, keys, num_heads, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    TILES: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores [ENTRIES] of one row; keys are the left operand, so that heads add up in a warp."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([ENTRIES], dtype=tl.float32)
    for tile in tl.static_range(TILES):
        head = tile * HEADS + tl.arange(0, HEADS)
        q = tl.load(
            q_ptr + (row * num_heads + head)[:, None] * WIDTH + column[None, :],
            mask=(head < num_heads)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        weight = tl.load(weights_ptr + row * num_heads + head, mask=head < num_heads, other=0.0).to(
            tl.float32
        )
        dots = tl.dot(keys, tl.trans(q))
        dots = tl.maximum(_round_bf16(dots), 0.0, propagate_nan=tl.PropagateNan.ALL)
        total += tl.sum(_round_bf16(dots * weight[None, :]), axis=1)
    return _round_bf16(total)


@triton.jit(do_not_specialize=["num_rows", "max_blocks", "max_visible", "span"])
def _scores(
    q_ptr, weights_ptr, cache_ptr, table_ptr, row_seq_ptr, visible_ptr, out_ptr, num_rows,
    num_heads, max_blocks, per_block, max_visible, span,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * span
    if ROWS == 1:
        row = tl.program_id(0).to(tl.int64)
        seq = tl.load(row_seq_ptr + row)
        visible = tl.minimum(tl.load(visible_ptr + row), max_visible).to(tl.int32)
        last = tl.minimum(first + span, max_visible)
        scored = tl.maximum(tl.minimum(last, visible), first)
        for start in range(first, scored, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            slot, present = _slots(table_ptr, seq, entry, entry < visible, max_blocks, per_block)
            keys = load_fp4(cache_ptr, slot, present, WIDTH, 0, 32, ENTRIES, BLOCK, tl.bfloat16)
            total = _score_keys(
                q_ptr, weights_ptr, row, keys, num_heads, WIDTH, HEADS, TILES, ENTRIES, BLOCK
            )
            total = tl.where(entry < visible, total, float("-inf"))
            tl.store(out_ptr + row * max_visible + entry, total, mask=entry < max_visible)
        unseen = first + tl.cdiv(scored - first, ENTRIES) * ENTRIES
        for start in range(unseen, last, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            nothing = tl.full([ENTRIES], float("-inf"), dtype=tl.float32)
            tl.store(out_ptr + row * max_visible + entry, nothing, mask=entry < max_visible)
    else:
        # Runs of rows of one request, which share a tile of keys.
        entry = first + tl.arange(0, ENTRIES)
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        seqs = tl.load(row_seq_ptr + rows, mask=rows < num_rows, other=-1)
        visibles = tl.load(visible_ptr + rows, mask=rows < num_rows, other=0)
        begin = tl.program_id(0) * ROWS
        last = tl.minimum(begin + ROWS, num_rows)
        while begin < last:
            seq = tl.load(row_seq_ptr + begin)
            end = tl.min(tl.where((rows > begin) & (seqs != seq), rows, last), axis=0)
            in_run = (rows >= begin) & (rows < end)
            visible = tl.max(tl.where(in_run, visibles, 0), axis=0)
            slot, present = _slots(
                table_ptr, seq, entry, (entry < visible) & (entry < max_visible), max_blocks,
                per_block,
            )  # fmt: skip
            keys = load_fp4(cache_ptr, slot, present, WIDTH, 0, 32, ENTRIES, BLOCK, tl.bfloat16)
            for one in range(begin, end):
                row = tl.cast(one, tl.int64)
                row_visible = tl.load(visible_ptr + row)
                total = _score_keys(
                    q_ptr, weights_ptr, row, keys, num_heads, WIDTH, HEADS, TILES, ENTRIES, BLOCK
                )
                total = tl.where(entry < row_visible, total, float("-inf"))
                tl.store(out_ptr + row * max_visible + entry, total, mask=entry < max_visible)
            begin = end


@triton.jit(do_not_specialize=["max_blocks", "max_visible"])
def _scores_fp32(
    q_ptr, weights_ptr, cache_ptr, table_ptr, row_seq_ptr, visible_ptr, out_ptr, num_heads,
    max_blocks, per_block, max_visible,
    WIDTH: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    visible = tl.load(visible_ptr + row)
    total = tl.full([ENTRIES], float("-inf"), dtype=tl.float32)
    if tl.program_id(1) * ENTRIES < visible:
        seq = tl.load(row_seq_ptr + row)
        seen = (entry < visible) & (entry < max_visible)
        slot, present = _slots(table_ptr, seq, entry, seen, max_blocks, per_block)
        column = tl.arange(0, BLOCK)
        keys = tl.load(
            cache_ptr + slot[:, None] * WIDTH + column[None, :],
            mask=present[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        total = tl.zeros([ENTRIES], dtype=tl.float32)
        for one in range(num_heads):
            q = tl.load(
                q_ptr + (row * num_heads + one) * WIDTH + column,
                mask=column < WIDTH,
                other=0.0,
            )
            dot = tl.sum(keys * q[None, :], axis=1)
            weight = tl.load(weights_ptr + row * num_heads + one)
            total += tl.maximum(dot, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight
        total = tl.where(seen, total, float("-inf"))
    tl.store(out_ptr + row * max_visible + entry, total, mask=entry < max_visible)


def index_scores(
    q: Tensor,
    head_weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    row_seq: Tensor,
    visible: Tensor,
    *,
    entries_per_block: int,
    max_visible: int,
) -> Tensor:
    """sum over heads of relu(<q_h, k_j>) * weight_h for every visible entry j.

    Args:
        q: [T, H, N] bf16 with an `mxfp4` cache, fp32 with an fp32 cache.
        head_weights: [T, H] in q's dtype.
        cache: [rows, N / 2 + N / 32] uint8, or [rows, N] fp32.
        block_table: [R, max_blocks] int64; entries of a block of -1 score 0.
        row_seq: [T] int64.
        visible: [T] int64.
        entries_per_block: entries of one block.
        max_visible: columns of the result.

    Returns:
        [T, max_visible] fp32, -inf from `visible` on; with records, dot, weighted product and
        sum are each rounded to bf16.
    """
    q = q.contiguous()
    num_rows, num_heads, width = q.shape
    out = torch.empty((num_rows, max_visible), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    head_weights, block_table = head_weights.contiguous(), block_table.contiguous()
    row_seq, visible = row_seq.contiguous(), visible.contiguous()
    block = max(32, triton.next_power_of_2(width))
    if cache.dtype is torch.float32:
        _scores_fp32[(num_rows, triton.cdiv(max_visible, _FP32_ENTRIES))](
            q, head_weights, cache, block_table, row_seq, visible, out, num_heads,
            block_table.shape[1], entries_per_block, max_visible, WIDTH=width,
            ENTRIES=_FP32_ENTRIES, BLOCK=block,
        )  # fmt: skip
        return out
    # Neither rows nor tiles of a program change what is added to a score, or in which order.
    rows = _ROWS if num_rows >= _ROWS * block_table.shape[0] else 1
    tiles = triton.cdiv(max_visible, _ENTRIES)
    per_program = 1 if rows > 1 else max(1, min(_MAX_TILES, num_rows * tiles // _PROGRAMS))
    heads = max(16, min(_HEADS, triton.next_power_of_2(num_heads)))
    _scores[(triton.cdiv(num_rows, rows), triton.cdiv(tiles, per_program))](
        q, head_weights, cache, block_table, row_seq, visible, out, num_rows, num_heads,
        block_table.shape[1], entries_per_block, max_visible, per_program * _ENTRIES, ROWS=rows,
        WIDTH=width, HEADS=heads, TILES=triton.cdiv(num_heads, heads), ENTRIES=_ENTRIES,
        BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return out


def index_scores_truth(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """[T, n] scores against keys [T, n, N] fp32, rounded where q's dtype is bf16, in torch."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(q.dtype).float()

    dots = rounded(torch.einsum("thc,tnc->thn", q.float(), keys))
    weighted = rounded(dots.relu() * head_weights.float().unsqueeze(-1))
    return rounded(weighted.sum(1))


_SIGNATURE = {
    "q_ptr": "*bf16", "weights_ptr": "*bf16", "cache_ptr": "*u8", "table_ptr": "*i64",
    "row_seq_ptr": "*i64", "visible_ptr": "*i64", "out_ptr": "*fp32", "num_heads": "i32",
    "max_blocks": "i32", "per_block": "i32", "max_visible": "i32",
}  # fmt: skip
_RECORDS = {**_SIGNATURE, "num_rows": "i32", "span": "i32"}
_SIZES = {"WIDTH": 128, "HEADS": _HEADS, "TILES": 1, "ENTRIES": _ENTRIES, "BLOCK": 128}
_TENSOR_CORES = {90: ("wgmma",), 100: ("tcgen05.mma",)}
COMPILE_CASES = (
    *(
        CompileCase(
            "_scores", _RECORDS, {"ROWS": rows, **_SIZES, "TILES": tiles},
            num_warps=_WARPS, required=_TENSOR_CORES, record_bytes=(68,),
            max_spill_bytes=8,  # two tiles of heads on SM100
        )
        for rows in (1, _ROWS)
        for tiles in (1, 2)
    ),
    CompileCase(
        "_scores",
        _RECORDS,
        {"ROWS": 1, **_SIZES, "WIDTH": 64, "HEADS": 16, "BLOCK": 64},
        num_warps=_WARPS,
        record_bytes=(34,),
    ),
    CompileCase(
        "_scores_fp32",
        {**_SIGNATURE, "q_ptr": "*fp32", "weights_ptr": "*fp32", "cache_ptr": "*fp32"},
        {"WIDTH": 128, "ENTRIES": _FP32_ENTRIES, "BLOCK": 128},
    ),
)  # fmt: skip
