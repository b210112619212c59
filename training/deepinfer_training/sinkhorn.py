"""The Sinkhorn part of an mHC mixing, with a backward that keeps sums instead of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Sinkhorn(torch.autograd.Function):
    """Alternating column and row normalisation of positive matrices [N, m, m]."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, eps: float, num_iters: int) -> Tensor:  # noqa: ANN401
        sums = []
        for step in range(2 * num_iters - 1):
            total = matrix.sum(-2 if step % 2 == 0 else -1, keepdim=True) + eps
            matrix = matrix / total
            sums.append(total)
        ctx.save_for_backward(matrix, *sums)
        return matrix

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        gradient = gradients[0]
        matrix, *sums = ctx.saved_tensors
        for step in reversed(range(len(sums))):
            dim = -2 if step % 2 == 0 else -1
            inner = (gradient * matrix).sum(dim, keepdim=True)
            gradient = (gradient - inner) / sums[step]
            # Undo the step: what it divided is what the step before returned.
            matrix = matrix * sums[step]
        return gradient, None, None


def eager_sinkhorn(matrix: Tensor, eps: float, num_iters: int) -> Tensor:
    """Normalise columns, then `num_iters` - 1 times rows and columns.

    Args:
        matrix: [N, m, m] fp32, positive; first index source, second destination stream.
        eps: added to every sum.
        num_iters: `hc_sinkhorn_iters`.
    Source: mHC.
    """
    result: Tensor = _Sinkhorn.apply(matrix, eps, num_iters)  # type: ignore[no-untyped-call]
    return result


normalise: Callable[[Tensor, float, int], Tensor] = eager_sinkhorn


def use(function: Callable[[Tensor, float, int], Tensor]) -> None:
    """Let every mixing call `function`, which has the contract of `eager_sinkhorn`."""
    globals()["normalise"] = function
