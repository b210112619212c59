"""Rotary position embedding of queries and attention outputs: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.attention.rotation_triton import rotated
from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.kv.records_triton import round_trip_mxfp4

_VALUES = 4096
"""Values of one program."""


@triton.jit
def _rope(
    x_ptr, positions_ptr, table_ptr, out_ptr, num_heads, width, num_rotated, row_stride,
    head_stride, INVERSE: tl.constexpr, ROUNDS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (column < width)
    position = tl.load(positions_ptr + row)
    value = rotated(
        x_ptr + row * row_stride + head * head_stride, table_ptr + position * num_rotated,
        column, inside, width, num_rotated, INVERSE,
    )  # fmt: skip
    if ROUNDS:
        value = round_trip_mxfp4(value, HEADS, BLOCK)
    out = out_ptr + (row * num_heads + head) * width + column
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside)


def rope(
    x: Tensor, positions: Tensor, table: Tensor, *, inverse: bool, rounds_mxfp4: bool = False
) -> Tensor:
    """Rotate the last R values of every head.

    Args:
        x: [T, H, N] bf16 or fp32; rows and heads may be strided, the last dimension is
            contiguous or the tensor is copied.
        positions: [T] int64.
        table: [max_positions, R] fp32: cos of the pairs, then sin.
        inverse: rotate back.
        rounds_mxfp4: give the values back that an index-key record would hold.

    Returns:
        [T, H, N] contiguous, in x's dtype.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_rows, num_heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = max(32, triton.next_power_of_2(width))
        heads = max(1, min(triton.next_power_of_2(num_heads), _VALUES // block))
        _rope[(num_rows, triton.cdiv(num_heads, heads))](
            x, positions.contiguous(), table, out, num_heads, width, table.shape[1],
            x.stride(0), x.stride(1), INVERSE=inverse, ROUNDS=rounds_mxfp4, HEADS=heads,
            BLOCK=block,
        )  # fmt: skip
    return out


def rope_truth(x: Tensor, positions: Tensor, table: Tensor, *, inverse: bool) -> Tensor:
    """`rope` without rounding, in plain torch, as complex products."""
    half = table.shape[1] // 2
    angles = table[positions].double()
    turn = torch.complex(angles[:, :half], -angles[:, half:] if inverse else angles[:, half:])
    pairs = x[..., -2 * half :].double().unflatten(-1, (half, 2)).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * turn.unsqueeze(1)).flatten(-2)
    return torch.cat((x[..., : -2 * half], turned.to(x.dtype)), dim=-1)


_SIGNATURE = {
    "x_ptr": "*bf16", "positions_ptr": "*i64", "table_ptr": "*fp32", "out_ptr": "*bf16",
    "num_heads": "i32", "width": "i32", "num_rotated": "i32", "row_stride": "i32",
    "head_stride": "i32",
}  # fmt: skip
COMPILE_CASES = (
    CompileCase("_rope", _SIGNATURE, {"INVERSE": False, "ROUNDS": False, "HEADS": 8, "BLOCK": 512}),
    CompileCase("_rope", _SIGNATURE, {"INVERSE": False, "ROUNDS": True, "HEADS": 32, "BLOCK": 128}),
)
