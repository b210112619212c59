"""Hashes of every token's n-grams: 64-bit integers, one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase


@triton.jit(do_not_specialize=["num_columns"])
def _hash(
    ids_ptr, history_ptr, row_seq_ptr, row_offset_ptr, map_ptr, multipliers_ptr, primes_ptr,
    offsets_ptr, out_ptr, num_columns, per_layer, num_heads, pad,
    ORDERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < num_columns
    layer = column // per_layer
    order = column % per_layer // num_heads  # 0: two tokens
    seq = tl.load(row_seq_ptr + row)
    offset = tl.load(row_offset_ptr + row)
    mixed = tl.zeros([BLOCK], dtype=tl.int64)
    alive = offset >= 0
    for shift in tl.static_range(ORDERS):
        in_step = offset >= shift
        token = tl.load(ids_ptr + row - shift, mask=in_step, other=-1)
        # History is oldest first; its last token stands before the step's first row.
        back = (ORDERS - 1) - shift + offset
        from_history = tl.load(
            history_ptr + seq * (ORDERS - 1) + back, mask=(offset < shift) & (back >= 0), other=-1
        )
        token = tl.where(in_step, token, from_history)
        alive = alive & (token >= 0)
        known = tl.load(map_ptr + token, mask=alive, other=0).to(tl.int64)
        compressed = tl.where(alive, known, pad)
        factor = tl.load(multipliers_ptr + layer * ORDERS + shift, mask=inside, other=0)
        mixed ^= tl.where(order + 1 >= shift, compressed * factor, 0)
    prime = tl.load(primes_ptr + column, mask=inside, other=1)
    rest = mixed % prime
    rest = tl.where(rest < 0, rest + prime, rest)
    table_row = rest + tl.load(offsets_ptr + column, mask=inside, other=0)
    tl.store(out_ptr + row * num_columns + column, table_row, mask=inside)


def ngram_hash(
    ids: Tensor,
    history: Tensor,
    row_seq: Tensor,
    row_offset: Tensor,
    *,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad: int,
) -> Tensor:
    """Table rows of every token's n-grams.

    Args:
        ids: [T] int64; -1 marks a dead token.
        history: [R, n - 1] int64 tokens before each request's first row, oldest first; -1 none.
        row_seq: [T] int64.
        row_offset: [T] int64 index of the row within its request's rows.
        token_map: [V] int64 or int32 compressed id of each token.
        multipliers: [L, n] int64.
        primes: [L, (n - 1) * heads] int64, columns by order then head.
        offsets: same shape, int64, first table row of each column.
        pad: compressed id that stands for dead and absent tokens.

    Returns:
        [T, L, (n - 1) * heads] int64.
    """
    num_rows = ids.shape[0]
    num_layers, per_layer = primes.shape
    max_ngram = multipliers.shape[1]
    out = torch.empty((num_rows, num_layers, per_layer), dtype=torch.int64, device=ids.device)
    if out.numel():
        num_columns = num_layers * per_layer
        _hash[(num_rows,)](
            ids.contiguous(), history.contiguous(), row_seq.contiguous(), row_offset.contiguous(),
            token_map, multipliers.contiguous(), primes.contiguous(), offsets.contiguous(), out,
            num_columns, per_layer, per_layer // (max_ngram - 1), pad, ORDERS=max_ngram,
            BLOCK=triton.next_power_of_2(num_columns), num_warps=1,
        )  # fmt: skip
    return out


def ngram_hash_truth(
    tokens: list[int], *, multipliers: list[int], prime: int, offset: int, pad: int
) -> int:
    """Table row of one n-gram of compressed ids, newest first; -1 and all before it are pad."""
    mixed, alive = 0, True
    for token, factor in zip(tokens, multipliers, strict=False):
        alive = alive and token >= 0
        mixed ^= ((token if alive else pad) * factor) & (2**64 - 1)
    signed = mixed - 2**64 if mixed >= 2**63 else mixed
    return signed % prime + offset


COMPILE_CASES = (
    CompileCase(
        "_hash",
        {
            "ids_ptr": "*i64", "history_ptr": "*i64", "row_seq_ptr": "*i64",
            "row_offset_ptr": "*i64", "map_ptr": "*i64", "multipliers_ptr": "*i64",
            "primes_ptr": "*i64", "offsets_ptr": "*i64", "out_ptr": "*i64", "num_columns": "i32",
            "per_layer": "i32", "num_heads": "i32", "pad": "i32",
        },
        {"ORDERS": 3, "BLOCK": 64},
        num_warps=1,
    ),
)  # fmt: skip
