"""The Sinkhorn steps as two Triton kernels: 39 normalisations in one launch each way."""

# A training machine has a GPU of one vendor; the engine's rule about vendor code is about engines.
# ruff: noqa: TID251, ANN001, ANN202

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS_PER_PROGRAM = 64


@triton.jit
def _forward_kernel(source, result, sums, num_tokens, EPS: tl.constexpr, ITERS: tl.constexpr,
                    BLOCK: tl.constexpr, M: tl.constexpr):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < num_tokens
    row = tl.arange(0, M)[None, :, None]
    column = tl.arange(0, M)[None, None, :]
    at = token[:, None, None] * (M * M) + row * M + column
    side = token[:, None] * M + tl.arange(0, M)[None, :]
    matrix = tl.load(source + at, mask=live[:, None, None], other=1.0)
    total = tl.sum(matrix, axis=1) + EPS
    tl.store(sums + side, total, mask=live[:, None])
    matrix = matrix / total[:, None, :]
    for step in range(ITERS - 1):
        total = tl.sum(matrix, axis=2) + EPS
        tl.store(sums + (2 * step + 1) * num_tokens * M + side, total, mask=live[:, None])
        matrix = matrix / total[:, :, None]
        total = tl.sum(matrix, axis=1) + EPS
        tl.store(sums + (2 * step + 2) * num_tokens * M + side, total, mask=live[:, None])
        matrix = matrix / total[:, None, :]
    tl.store(result + at, matrix, mask=live[:, None, None])


@triton.jit
def _backward_kernel(result, gradient, sums, out, num_tokens, ITERS: tl.constexpr,
                     BLOCK: tl.constexpr, M: tl.constexpr):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < num_tokens
    row = tl.arange(0, M)[None, :, None]
    column = tl.arange(0, M)[None, None, :]
    at = token[:, None, None] * (M * M) + row * M + column
    side = token[:, None] * M + tl.arange(0, M)[None, :]
    matrix = tl.load(result + at, mask=live[:, None, None], other=0.25)
    grad = tl.load(gradient + at, mask=live[:, None, None], other=0.0)
    for turn in range(ITERS - 1):
        step = ITERS - 2 - turn
        total = tl.load(
            sums + (2 * step + 2) * num_tokens * M + side, mask=live[:, None], other=1.0
        )
        grad = (grad - tl.sum(grad * matrix, axis=1)[:, None, :]) / total[:, None, :]
        matrix = matrix * total[:, None, :]
        total = tl.load(
            sums + (2 * step + 1) * num_tokens * M + side, mask=live[:, None], other=1.0
        )
        grad = (grad - tl.sum(grad * matrix, axis=2)[:, :, None]) / total[:, :, None]
        matrix = matrix * total[:, :, None]
    total = tl.load(sums + side, mask=live[:, None], other=1.0)
    grad = (grad - tl.sum(grad * matrix, axis=1)[:, None, :]) / total[:, None, :]
    tl.store(out + at, grad, mask=live[:, None, None])


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, eps: float, num_iters: int) -> Tensor:  # noqa: ANN401
        matrix = matrix.contiguous()
        num_tokens, m, _ = matrix.shape
        result = torch.empty_like(matrix)
        sums = matrix.new_empty((2 * num_iters - 1, num_tokens, m))
        grid = (triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM),)
        _forward_kernel[grid](
            matrix, result, sums, num_tokens,
            EPS=eps, ITERS=num_iters, BLOCK=_TOKENS_PER_PROGRAM, M=m, num_warps=2,
        )  # fmt: skip
        ctx.save_for_backward(result, sums)
        ctx.num_iters = num_iters
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        result, sums = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        num_tokens, m, _ = gradient.shape
        out = torch.empty_like(gradient)
        grid = (triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM),)
        _backward_kernel[grid](
            result, gradient, sums, out, num_tokens,
            ITERS=ctx.num_iters, BLOCK=_TOKENS_PER_PROGRAM, M=m, num_warps=2,
        )  # fmt: skip
        return out, None, None


def triton_sinkhorn(matrix: Tensor, eps: float, num_iters: int) -> Tensor:
    """As `sinkhorn.eager_sinkhorn`, for a matrix [N, m, m] on a GPU; m is a power of two."""
    result: Tensor = _Sinkhorn.apply(matrix, eps, num_iters)
    return result
