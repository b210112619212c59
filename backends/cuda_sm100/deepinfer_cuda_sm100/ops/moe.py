"""MoE family on Triton kernels: gate, slots, grouped products, combine."""

from __future__ import annotations

import functools

from torch import Tensor

from deepinfer.device.handles import ExpertBatch, ExpertWeights, LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import moe
from deepinfer.device.ops.moe import Routing
from deepinfer_cuda_sm100.handles import PackedExperts, SlotBatch, own_handle
from deepinfer_cuda_sm100.ops.quant import input_operand, linear_f32
from deepinfer_kernels.moe import gate_triton, slots_triton, swiglu_triton
from deepinfer_kernels.quant.gemm_triton import expert_gemm


def moe_gate(
    x: Tensor, weight: LinearWeight, bias: Tensor, *, num_experts_per_tok: int, route_scale: float
) -> Routing:
    logits = linear_f32(x, weight)
    return Routing(
        *gate_triton.choose_experts(logits, bias, k=num_experts_per_tok, route_scale=route_scale)
    )


def moe_dispatch(x: Tensor, routing: Routing, physical: Tensor, valid: Tensor) -> ExpertBatch:
    slots = slots_triton.place_rows(routing.ids, routing.weights, physical, valid)
    return SlotBatch(x, slots.tile_experts, slots.slot_rows, slots.slot_weights, slots.row_slots)


def moe_experts(batch: ExpertBatch, weights: ExpertWeights, swiglu_limit: float) -> Tensor:
    slots, packed = own_handle(batch, SlotBatch), own_handle(weights, PackedExperts)
    dtype = slots.x.dtype
    operand = functools.partial(
        input_operand, quantizes=packed.quantizes_input, block_scaled=packed.block_scaled
    )
    hidden = expert_gemm(
        operand(slots.x),
        packed.gate_up,
        slots.tile_experts,
        slots.slot_rows,
        gather=True,
        dtype=dtype,
        block_scaled=packed.block_scaled,
    )
    activated = swiglu_triton.swiglu_slots(
        hidden, slots.slot_rows, slots.slot_weights, swiglu_limit
    )
    return expert_gemm(
        operand(activated),
        packed.down,
        slots.tile_experts,
        slots.slot_rows,
        gather=False,
        dtype=dtype,
        block_scaled=packed.block_scaled,
    )


def moe_combine(outputs: Tensor, batch: ExpertBatch, shared: Tensor) -> Tensor:
    return swiglu_triton.combine(outputs, own_handle(batch, SlotBatch).slots, shared)


def swiglu(gate_up: Tensor, swiglu_limit: float) -> Tensor:
    return swiglu_triton.swiglu(gate_up, swiglu_limit)


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(moe.moe_gate, reason=reason)(moe_gate)
    table.implements(moe.moe_dispatch, reason=reason)(moe_dispatch)
    table.implements(moe.moe_experts, reason=reason)(moe_experts)
    table.implements(moe.moe_combine, reason=reason)(moe_combine)
    table.implements(moe.swiglu, reason=reason)(swiglu)
