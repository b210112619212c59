"""RMSNorm: one program per row, the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase


@triton.jit
def _rmsnorm(x_ptr, weight_ptr, out_ptr, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    normed = weight * (x * scale)
    tl.store(out_ptr + row * width + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension.

    Args:
        x: [..., N] bf16 or fp32; copied if it is not contiguous.
        weight: [N] fp32.
        eps: added to the mean square.

    Returns:
        [..., N] in x's dtype, fp32 arithmetic, one cast.
    """
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        _rmsnorm[(x.numel() // width,)](
            x, weight, out, width, eps, BLOCK=block, num_warps=8 if block > 2048 else 4
        )
    return out


def rmsnorm_truth(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in plain torch."""
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (weight * (values * scale)).to(x.dtype)


_SIGNATURE = {
    "x_ptr": "*bf16",
    "weight_ptr": "*fp32",
    "out_ptr": "*bf16",
    "width": "i32",
    "eps": "fp32",
}
COMPILE_CASES = (
    CompileCase("_rmsnorm", _SIGNATURE, {"BLOCK": 8192}, num_warps=8),
    CompileCase("_rmsnorm", _SIGNATURE, {"BLOCK": 512}),
)
