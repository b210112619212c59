"""mHC mixing coefficients: a projection split over its long inner dimension, then Sinkhorn.

The projection keeps fp32 accuracy: fp32 products in exact numerics, three TF32 products (bf16
streams are exact in TF32, the weights are split) in normative numerics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_ROWS = 16
_INNER = 64
_INNER_PER_SPLIT = 1024
_COEFFICIENT_ROWS = 8


@triton.jit(do_not_specialize=["num_rows"])
def _project(
    x_ptr, fn_ptr, partial_ptr, squares_ptr, num_rows, num_outputs, inner,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr,
    PER_SPLIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    output = tl.arange(0, OUTPUTS)
    acc = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    squares = tl.zeros([ROWS], dtype=tl.float32)
    for step in range(0, PER_SPLIT, INNER):
        k = split * PER_SPLIT + step + tl.arange(0, INNER)
        x = tl.load(
            x_ptr + row[:, None] * inner + k[None, :],
            mask=(row < num_rows)[:, None] & (k < inner)[None, :],
            other=0.0,
        ).to(tl.float32)
        fn = tl.load(
            fn_ptr + output[:, None] * inner + k[None, :],
            mask=(output < num_outputs)[:, None] & (k < inner)[None, :],
            other=0.0,
        )
        acc = tl.dot(fn, tl.trans(x), acc, input_precision=PRECISION)
        squares += tl.sum(x * x, axis=1)
    at = (split * num_rows + row)[None, :] * OUTPUTS + output[:, None]
    tl.store(partial_ptr + at, acc, mask=(row < num_rows)[None, :] & (output >= 0)[:, None])
    tl.store(squares_ptr + split * num_rows + row, squares, mask=row < num_rows)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def _coefficients(
    partial_ptr, squares_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, comb_ptr, num_rows, inner,
    norm_eps, hc_eps, num_iters,
    SPLITS: tl.constexpr, OUTPUTS: tl.constexpr, M: tl.constexpr, M_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < num_rows
    stream = tl.arange(0, M_BLOCK)
    squares = tl.zeros([ROWS], dtype=tl.float32)
    pre = tl.zeros([ROWS, M_BLOCK], dtype=tl.float32)
    post = tl.zeros([ROWS, M_BLOCK], dtype=tl.float32)
    comb = tl.zeros([ROWS, M_BLOCK, M_BLOCK], dtype=tl.float32)
    one = valid[:, None] & (stream < M)[None, :]
    two = one[:, :, None] & (stream < M)[None, None, :]
    pair = stream[None, :, None] * M + stream[None, None, :]
    for split in range(SPLITS):
        base = partial_ptr + (split * num_rows + row) * OUTPUTS
        squares += tl.load(squares_ptr + split * num_rows + row, mask=valid, other=0.0)
        pre += tl.load(base[:, None] + stream[None, :], mask=one, other=0.0)
        post += tl.load(base[:, None] + M + stream[None, :], mask=one, other=0.0)
        comb += tl.load(base[:, None, None] + 2 * M + pair, mask=two, other=0.0)
    statistic = tl.rsqrt(squares / inner + norm_eps)
    in_base = stream < M
    pre = pre * statistic[:, None] * tl.load(scale_ptr)
    pre = _sigmoid(pre + tl.load(base_ptr + stream, mask=in_base, other=0.0)[None, :]) + hc_eps
    post = post * statistic[:, None] * tl.load(scale_ptr + 1)
    post = 2.0 * _sigmoid(post + tl.load(base_ptr + M + stream, mask=in_base, other=0.0)[None, :])
    offset = tl.load(base_ptr + 2 * M + pair, mask=(pair >= 0) & two, other=0.0)
    logits = comb * statistic[:, None, None] * tl.load(scale_ptr + 2) + offset
    inside = (stream < M)[None, :, None] & (stream < M)[None, None, :]
    inside = inside & (row >= 0)[:, None, None]
    logits = tl.where(inside, logits, float("-inf"))
    # Rows and columns beyond M stay zero through every step.
    top = tl.max(logits, axis=2, keep_dims=True)
    p = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top))
    p = p / tl.maximum(tl.sum(p, axis=2, keep_dims=True), 1e-30)
    p = tl.where(inside, p + hc_eps, 0.0)
    p = p / (tl.sum(p, axis=1, keep_dims=True) + hc_eps)
    for _ in range(1, num_iters):
        p = p / (tl.sum(p, axis=2, keep_dims=True) + hc_eps)
        p = p / (tl.sum(p, axis=1, keep_dims=True) + hc_eps)
    tl.store(pre_ptr + row[:, None] * M + stream[None, :], pre, mask=one)
    tl.store(post_ptr + row[:, None] * M + stream[None, :], post, mask=one)
    tl.store(comb_ptr + row[:, None, None] * M * M + pair, p, mask=two)


def mix(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of every row.

    Args:
        streams: [T, M, D] bf16 or fp32.
        fn: [(2 + M) * M, M * D] fp32.
        scale: [3] fp32.
        base: [(2 + M) * M] fp32.
        norm_eps: eps of the mean square over M * D values.
        hc_eps: eps of sigmoid, softmax and Sinkhorn.
        num_iters: Sinkhorn iterations.

    Returns:
        pre [T, M], post [T, M], comb [T, M, M], fp32.
    """
    streams = streams.contiguous()
    num_rows, m, width = streams.shape
    inner, outputs = m * width, fn.shape[0]
    device = streams.device
    pre = torch.empty((num_rows, m), dtype=torch.float32, device=device)
    post, comb = torch.empty_like(pre), pre.new_empty((num_rows, m, m))
    if num_rows == 0:
        return pre, post, comb
    splits = triton.cdiv(inner, _INNER_PER_SPLIT)
    block = max(16, triton.next_power_of_2(outputs))
    partial = pre.new_empty((splits, num_rows, block))
    squares = pre.new_empty((splits, num_rows))
    _project[(triton.cdiv(num_rows, _ROWS), splits)](
        streams, fn, partial, squares, num_rows, outputs, inner,
        PRECISION="ieee" if streams.dtype is torch.float32 else "tf32x3", ROWS=_ROWS,
        OUTPUTS=block, INNER=_INNER, PER_SPLIT=_INNER_PER_SPLIT,
    )  # fmt: skip
    _coefficients[(triton.cdiv(num_rows, _COEFFICIENT_ROWS),)](
        partial, squares, scale, base, pre, post, comb, num_rows, inner, norm_eps, hc_eps,
        num_iters, SPLITS=splits, OUTPUTS=block, M=m, M_BLOCK=triton.next_power_of_2(m),
        ROWS=_COEFFICIENT_ROWS, num_warps=1,
    )  # fmt: skip
    return pre, post, comb


def mix_truth(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mix` in plain torch, float64."""
    m = streams.shape[1]
    flat = streams.flatten(1).double()
    mixed = flat @ fn.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = mixed.split((m, m, m * m), dim=1)
    offset_pre, offset_post, offset_comb = base.double().split((m, m, m * m))
    factor = scale.double()
    first = torch.sigmoid(pre * factor[0] + offset_pre) + hc_eps
    second = 2.0 * torch.sigmoid(post * factor[1] + offset_post)
    p = torch.softmax((comb * factor[2] + offset_comb).view(-1, m, m), dim=-1) + hc_eps
    for step in range(2 * num_iters - 1):
        p = p / (p.sum(2 if step % 2 else 1, keepdim=True) + hc_eps)
    return first.float(), second.float(), p.float()


_PROJECT = {
    "x_ptr": "*bf16", "fn_ptr": "*fp32", "partial_ptr": "*fp32", "squares_ptr": "*fp32",
    "num_rows": "i32", "num_outputs": "i32", "inner": "i32",
}  # fmt: skip
_SIZES = {"ROWS": _ROWS, "OUTPUTS": 32, "INNER": _INNER, "PER_SPLIT": _INNER_PER_SPLIT}
COMPILE_CASES = (
    CompileCase("_project", _PROJECT, {"PRECISION": "tf32x3", **_SIZES}),
    CompileCase(
        "_project", {**_PROJECT, "x_ptr": "*fp32"}, {"PRECISION": "ieee", **_SIZES}
    ),
    CompileCase(
        "_coefficients",
        {
            "partial_ptr": "*fp32", "squares_ptr": "*fp32", "scale_ptr": "*fp32",
            "base_ptr": "*fp32", "pre_ptr": "*fp32", "post_ptr": "*fp32", "comb_ptr": "*fp32",
            "num_rows": "i32", "inner": "i32", "norm_eps": "fp32", "hc_eps": "fp32",
            "num_iters": "i32",
        },
        {"SPLITS": 20, "OUTPUTS": 32, "M": 4, "M_BLOCK": 4, "ROWS": _COEFFICIENT_ROWS},
        num_warps=1,
    ),
)  # fmt: skip
