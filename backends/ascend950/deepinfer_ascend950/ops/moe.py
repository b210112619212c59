"""MoE family: sort rows by expert, grouped products, bring them back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as matmul
from torch.nn.functional import silu, softplus

from deepinfer.device.handles import ExpertBatch, ExpertWeights, LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import moe
from deepinfer.device.ops.moe import Routing
from deepinfer_ascend950.handles import (
    NO_EXPERT,
    ExpertMatrices,
    FloatLinear,
    PackedExperts,
    SlotBatch,
    own_handle,
)
from deepinfer_ascend950.operators import NpuOperators
from deepinfer_ascend950.packing import aligned_inner

_RENORM_EPS = 1e-20
_SOFTPLUS_THRESHOLD = 20.0


def moe_gate(
    x: Tensor, weight: LinearWeight, bias: Tensor, *, num_experts_per_tok: int, route_scale: float
) -> Routing:
    logits = matmul(x.float(), own_handle(weight, FloatLinear).matrix_f32)
    score = softplus(logits, threshold=_SOFTPLUS_THRESHOLD).sqrt()
    order = torch.sort(score + bias, dim=1, descending=True, stable=True).indices
    ids = order[:, :num_experts_per_tok].contiguous()
    weights = score.gather(1, ids)
    total = weights.sum(1, keepdim=True) + _RENORM_EPS
    return Routing(ids, weights / total * route_scale)


def _clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    return silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)


def swiglu(gate_up: Tensor, swiglu_limit: float) -> Tensor:
    return _clamped_swiglu(gate_up, swiglu_limit).to(gate_up.dtype)


class MoeOps:
    """Dispatch, experts and combine on one rank."""

    def __init__(self, npu: NpuOperators) -> None:
        self._npu = npu

    def moe_dispatch(
        self, x: Tensor, routing: Routing, physical: Tensor, valid: Tensor
    ) -> ExpertBatch:
        num_rows, top_k = routing.ids.shape
        ids, by_id = routing.ids.sort(dim=1)
        weights = routing.weights.gather(1, by_id)
        expert = physical.index_select(0, ids.flatten()).view(num_rows, top_k)
        expert = torch.where(valid.unsqueeze(1), expert, NO_EXPERT)
        if num_rows == 0:
            places = ids.to(torch.int32)
            return SlotBatch(x, expert.flatten(), weights.flatten(), places)
        # A padding row may hold NaN, and it is multiplied like any other behind the last group.
        rows = torch.where(valid.unsqueeze(1), x, 0.0)
        permuted, places = self._npu.permute(rows, expert)
        where = places.long()
        return SlotBatch(
            rows=permuted,
            experts=torch.empty_like(where).scatter(0, where, expert.flatten()),
            weights=torch.empty_like(weights).flatten().scatter(0, where, weights.flatten()),
            places=places.view(num_rows, top_k),
        )

    def moe_experts(
        self, batch: ExpertBatch, weights: ExpertWeights, swiglu_limit: float
    ) -> Tensor:
        slots, packed = own_handle(batch, SlotBatch), own_handle(weights, PackedExperts)
        if slots.rows.shape[0] == 0:
            return slots.rows.new_empty((0, packed.down.out_features))
        num_experts = packed.num_experts
        experts = slots.experts.clamp_max(num_experts)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
        counts = counts.scatter_add(0, experts, torch.ones_like(experts))[:num_experts]
        hidden = self._product(slots.rows, packed.gate_up, counts)
        # The projection is cast like that of every linear before its activation.
        activated = _clamped_swiglu(hidden, swiglu_limit) * slots.weights.unsqueeze(1)
        return self._product(activated.to(slots.rows.dtype), packed.down, counts)

    def _product(self, x: Tensor, matrices: ExpertMatrices, counts: Tensor) -> Tensor:
        """x [S, K] by group times its matrix, in x's dtype: [S, N]."""
        if matrices.scales is None:
            product = self._npu.grouped_float(x.to(matrices.data.dtype), matrices.data, counts)
            return product.to(x.dtype)
        codes, scales = self._npu.mx_quantize(aligned_inner(x))
        multiply = (
            self._npu.grouped_w4a8 if matrices.data.dtype is torch.uint8 else self._npu.grouped_w8a8
        )
        product = multiply(codes, scales, matrices.data, matrices.scales, counts)
        return product[:, : matrices.out_features].to(x.dtype)

    def moe_combine(self, outputs: Tensor, batch: ExpertBatch, shared: Tensor) -> Tensor:
        slots = own_handle(batch, SlotBatch)
        if outputs.shape[0] == 0:
            return shared.clone()
        unused = (slots.experts == NO_EXPERT).unsqueeze(1)
        rows = outputs.float().masked_fill(unused, 0.0)
        return (self._npu.combine(rows, slots.places) + shared.float()).to(shared.dtype)

    def register(self, table: OpTable) -> None:
        """Add this family's implementations to `table`."""
        table.implements(
            moe.moe_gate,
            reason="torch: npu_moe_gating_top_k has softmax and sigmoid, not sqrt(softplus)",
            layout="fp32, HF32 off; stable sort",
        )(moe_gate)
        table.implements(
            moe.moe_dispatch,
            reason="npu_moe_token_permute; padding rows are sorted behind the last expert",
            layout="activation dtype, int64 experts, int32 places",
        )(self.moe_dispatch)
        table.implements(
            moe.moe_experts,
            reason="npu_dynamic_mx_quant + npu_grouped_matmul twice; the fused SwiGLU operators "
            "clamp otherwise or lack a page",
            layout="A8 x W4: E2M1 [E, N, K/2] seen as [E, K/2, N], scales as antiquant_scale "
            "[E, K/64, N, 2]; group_list of counts; bf16 out",
        )(self.moe_experts)
        table.implements(
            moe.moe_combine,
            reason="npu_moe_finalize_routing on fp32; shared experts added in torch, cast once",
            layout="fp32 rows, int32 places by columns (drop_pad_mode 0), scales of ones",
        )(self.moe_combine)
        table.implements(
            moe.swiglu,
            reason="torch: npu_swiglu has no clamp, npu_clipped_swiglu is not listed for 950",
            layout="fp32, one cast",
        )(swiglu)
