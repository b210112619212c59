"""Scores of index queries against the index keys of every visible entry, through block tables."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.kv.records_triton import load_fp4

_ENTRIES = 64
_HEADS = 32
"""Heads of one product; Triton 3.6 cannot compile this kernel with 64 for SM90."""


@triton.jit
def _round_bf16(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["max_blocks", "max_visible"])
def _scores(
    q_ptr, weights_ptr, cache_ptr, table_ptr, row_seq_ptr, visible_ptr, out_ptr, num_heads,
    max_blocks, per_block, max_visible,
    WIDTH: tl.constexpr, RECORDS: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    visible = tl.load(visible_ptr + row)
    total = tl.full([ENTRIES], float("-inf"), dtype=tl.float32)
    if tl.program_id(1) * ENTRIES < visible:
        seq = tl.load(row_seq_ptr + row)
        seen = (entry < visible) & (entry < max_visible)
        block = tl.load(table_ptr + seq * max_blocks + entry // per_block, mask=seen, other=-1)
        slot = block * per_block + entry % per_block
        present = seen & (block >= 0)
        column = tl.arange(0, BLOCK)
        if RECORDS:
            keys = load_fp4(cache_ptr, slot, present, WIDTH, 0, 32, ENTRIES, BLOCK, tl.bfloat16)
            total = tl.zeros([ENTRIES], dtype=tl.float32)
            for tile in tl.static_range(TILES):
                head = tile * HEADS + tl.arange(0, HEADS)
                q = tl.load(
                    q_ptr + (row * num_heads + head)[:, None] * WIDTH + column[None, :],
                    mask=(head < num_heads)[:, None] & (column < WIDTH)[None, :],
                    other=0.0,
                )
                dots = tl.dot(q, tl.trans(keys))
                weight = tl.load(
                    weights_ptr + row * num_heads + head, mask=head < num_heads, other=0.0
                ).to(tl.float32)
                dots = tl.maximum(_round_bf16(dots), 0.0, propagate_nan=tl.PropagateNan.ALL)
                total += tl.sum(_round_bf16(dots * weight[:, None]), axis=0)
            total = _round_bf16(total)
        else:
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
    if out.numel():
        heads = max(16, min(_HEADS, triton.next_power_of_2(num_heads)))
        _scores[(num_rows, triton.cdiv(max_visible, _ENTRIES))](
            q, head_weights.contiguous(), cache, block_table.contiguous(), row_seq.contiguous(),
            visible.contiguous(), out, num_heads, block_table.shape[1], entries_per_block,
            max_visible, WIDTH=width, RECORDS=cache.dtype is torch.uint8,
            HEADS=heads, TILES=triton.cdiv(num_heads, heads), ENTRIES=_ENTRIES,
            BLOCK=max(32, triton.next_power_of_2(width)),
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
_SIZES = {"WIDTH": 128, "HEADS": _HEADS, "TILES": 1, "ENTRIES": _ENTRIES, "BLOCK": 128}
COMPILE_CASES = (
    CompileCase("_scores", _SIGNATURE, {"RECORDS": True, **_SIZES}, record_bytes=(68,)),
    CompileCase(
        "_scores",
        _SIGNATURE,
        {"RECORDS": True, "WIDTH": 64, "HEADS": 16, "TILES": 1, "ENTRIES": _ENTRIES, "BLOCK": 64},
        record_bytes=(34,),
    ),
    CompileCase("_scores", _SIGNATURE, {"RECORDS": True, **_SIZES, "TILES": 2}),
    CompileCase(
        "_scores",
        {**_SIGNATURE, "q_ptr": "*fp32", "weights_ptr": "*fp32", "cache_ptr": "*fp32"},
        {"RECORDS": False, **_SIZES},
    ),
)
