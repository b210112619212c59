"""Clamped SwiGLU, and bringing slot outputs back to their rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_ROWS = 16
"""Rows of one program; a whole number of them makes a tile of expert slots."""
_COLUMNS = 1024
_SLOT_COLUMNS = 256


@triton.jit
def _activate(
    gate_up_ptr, out_ptr, row, inside_rows, weights, inner, limit, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = inside_rows[:, None] & (column < inner)
    at = row[:, None] * 2 * inner + column
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + inner, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    value = gate / (1.0 + tl.exp(-gate)) * up * weights[:, None]
    out = out_ptr + row[:, None] * inner + column
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu(
    gate_up_ptr, slot_rows_ptr, slot_weights_ptr, out_ptr, num_rows, inner, limit,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = row < num_rows
    if SLOTS:
        # Slots of a tile are filled from its first; padding stays unwritten, nobody reads it.
        if tl.load(slot_rows_ptr + first) >= 0:
            filled = tl.load(slot_rows_ptr + row, mask=inside, other=-1) >= 0
            weights = tl.load(slot_weights_ptr + row, mask=filled, other=0.0)
            _activate(gate_up_ptr, out_ptr, row, filled, weights, inner, limit, ROWS, BLOCK)
    else:
        ones = tl.full([ROWS], 1.0, tl.float32)
        _activate(gate_up_ptr, out_ptr, row, inside, ones, inner, limit, ROWS, BLOCK)


@triton.jit
def _combine(outputs_ptr, row_slots_ptr, shared_ptr, out_ptr, width, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in range(k):
        slot = tl.load(row_slots_ptr + row * k + place).to(tl.int64)
        value = tl.load(outputs_ptr + slot * width + column, mask=inside & (slot >= 0), other=0.0)
        total += value.to(tl.float32)
    shared = tl.load(shared_ptr + row * width + column, mask=inside, other=0.0)
    total += shared.to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(g, limit)) * clamp(u, -limit, limit).

    Args:
        gate_up: [T, 2 I] bf16 or fp32, gate then up.
        limit: clamp.

    Returns:
        [T, I] in gate_up's dtype, fp32 arithmetic, one cast.
    """
    return _run_swiglu(gate_up, None, None, limit)


def swiglu_slots(gate_up: Tensor, slot_rows: Tensor, slot_weights: Tensor, limit: float) -> Tensor:
    """The same for expert slots, times the routing weight.

    Args:
        gate_up: [S, 2 I].
        slot_rows: [S] int32; slots of -1 are skipped, their result is unspecified.
        slot_weights: [S] fp32.
        limit: clamp.

    Returns:
        [S, I] in gate_up's dtype.
    """
    return _run_swiglu(gate_up, slot_rows, slot_weights, limit)


def _run_swiglu(
    gate_up: Tensor, slot_rows: Tensor | None, slot_weights: Tensor | None, limit: float
) -> Tensor:
    gate_up = gate_up.contiguous()
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(_SLOT_COLUMNS, triton.next_power_of_2(inner))
        _swiglu[(triton.cdiv(num_rows, _ROWS), triton.cdiv(inner, block))](
            gate_up, slot_rows, slot_weights, out, num_rows, inner, limit,
            SLOTS=slot_rows is not None, ROWS=_ROWS, BLOCK=block,
        )  # fmt: skip
    return out


def combine(outputs: Tensor, row_slots: Tensor, shared: Tensor) -> Tensor:
    """Sum of each row's slot outputs in order, plus the shared expert, in fp32.

    Args:
        outputs: [S, D] bf16 or fp32.
        row_slots: [T, k] int32; -1 adds nothing.
        shared: [T, D] same dtype.

    Returns:
        [T, D], one cast.
    """
    shared = shared.contiguous()
    out = torch.empty_like(shared)
    if out.numel():
        width = shared.shape[1]
        block = min(_COLUMNS, triton.next_power_of_2(width))
        _combine[(shared.shape[0], triton.cdiv(width, block))](
            outputs.contiguous(), row_slots, shared, out, width, row_slots.shape[1], BLOCK=block
        )
    return out


def swiglu_truth(gate_up: Tensor, limit: float) -> Tensor:
    """`swiglu` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=1)
    value = torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return value.to(gate_up.dtype)


def combine_truth(outputs: Tensor, row_slots: Tensor, shared: Tensor) -> Tensor:
    """`combine` in plain torch."""
    total = torch.zeros(shared.shape)
    for slots in row_slots.T.long():
        part = outputs[slots.clamp_min(0)].float()
        total += part.masked_fill((slots < 0).unsqueeze(1), 0.0)
    return (total + shared.float()).to(shared.dtype)


COMPILE_CASES = (
    CompileCase(
        "_swiglu",
        {
            "gate_up_ptr": "*bf16", "slot_rows_ptr": "*i32", "slot_weights_ptr": "*fp32",
            "out_ptr": "*bf16", "num_rows": "i32", "inner": "i32", "limit": "fp32",
        },
        {"SLOTS": True, "ROWS": _ROWS, "BLOCK": _SLOT_COLUMNS},
    ),
    CompileCase(
        "_combine",
        {
            "outputs_ptr": "*bf16", "row_slots_ptr": "*i32", "shared_ptr": "*bf16",
            "out_ptr": "*bf16", "width": "i32", "k": "i32",
        },
        {"BLOCK": _COLUMNS},
    ),
)  # fmt: skip
