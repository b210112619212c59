"""Collapsing the residual streams into a sublayer's input, and spreading its output over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_COLUMNS = 1024
"""Columns of one program of the expansion."""


@triton.jit
def _collapse(
    streams_ptr, pre_ptr, weight_ptr, out_ptr, width, eps, M: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for stream in tl.static_range(M):
        weight = tl.load(pre_ptr + row * M + stream)
        values = tl.load(streams_ptr + (row * M + stream) * width + column, mask=inside, other=0.0)
        total += weight * values.to(tl.float32)
    if NORM:
        # Rounded as if the collapsed row had been stored before the norm.
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
        total = tl.load(weight_ptr + column, mask=inside, other=0.0) * (total * scale)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expand(
    y_ptr, streams_ptr, post_ptr, comb_ptr, out_ptr, width, M: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    y = tl.load(y_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    for target in tl.static_range(M):
        total = tl.load(post_ptr + row * M + target) * y
        for source in tl.static_range(M):
            weight = tl.load(comb_ptr + row * M * M + source * M + target)
            values = tl.load(
                streams_ptr + (row * M + source) * width + column, mask=inside, other=0.0
            )
            total += weight * values.to(tl.float32)
        at = (row * M + target) * width + column
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Weighted sum of the streams, rounded to their dtype, then RMSNorm.

    Args:
        streams: [T, M, D] bf16 or fp32.
        pre: [T, M] fp32.
        weight: [D] fp32.
        eps: eps of the norm.

    Returns:
        [T, D] in the streams' dtype.
    """
    return _run_collapse(streams, pre, weight, eps)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams: [T, M, D] and [T, M] fp32 -> [T, D], one cast."""
    return _run_collapse(streams, pre, None, 0.0)


def _run_collapse(streams: Tensor, pre: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    streams = streams.contiguous()
    num_rows, m, width = streams.shape
    out = torch.empty((num_rows, width), dtype=streams.dtype, device=streams.device)
    if out.numel():
        block = triton.next_power_of_2(width)
        _collapse[(num_rows,)](
            streams, pre.contiguous(), weight, out, width, eps, M=m, NORM=weight is not None,
            BLOCK=block, num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return out


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[j] * y + sum_i comb[i, j] * streams[i], one cast.

    Args:
        y: [T, D] bf16 or fp32.
        streams: [T, M, D], same dtype.
        post: [T, M] fp32.
        comb: [T, M, M] fp32, [source, destination].

    Returns:
        [T, M, D].
    """
    streams = streams.contiguous()
    num_rows, m, width = streams.shape
    out = torch.empty_like(streams)
    if out.numel():
        block = min(_COLUMNS, triton.next_power_of_2(width))
        _expand[(num_rows, triton.cdiv(width, block))](
            y.contiguous(), streams, post.contiguous(), comb.contiguous(), out, width, M=m,
            BLOCK=block,
        )  # fmt: skip
    return out


def expand_truth(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`expand` in plain torch, float64."""
    mixed = torch.einsum("tij,tid->tjd", comb.double(), streams.double())
    return (post.double().unsqueeze(-1) * y.double().unsqueeze(1) + mixed).to(streams.dtype)


def collapse_norm_truth(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`collapse_norm` in plain torch."""
    total = (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype).float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (weight * (total * scale)).to(streams.dtype)


COMPILE_CASES = (
    CompileCase(
        "_collapse",
        {
            "streams_ptr": "*bf16", "pre_ptr": "*fp32", "weight_ptr": "*fp32", "out_ptr": "*bf16",
            "width": "i32", "eps": "fp32",
        },
        {"M": 4, "NORM": True, "BLOCK": 8192},
        num_warps=8,
    ),
    CompileCase(
        "_expand",
        {
            "y_ptr": "*bf16", "streams_ptr": "*bf16", "post_ptr": "*fp32", "comb_ptr": "*fp32",
            "out_ptr": "*bf16", "width": "i32",
        },
        {"M": 4, "BLOCK": _COLUMNS},
    ),
)  # fmt: skip
