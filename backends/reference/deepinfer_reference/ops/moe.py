"""Reference of the MoE family: rows sorted by expert, one product per expert that has rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from deepinfer.device.formats import round_trip_a8
from deepinfer.device.handles import ExpertBatch, ExpertWeights, LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import moe
from deepinfer.device.ops.moe import Routing
from deepinfer_reference.gemm import ROW_TILE, in_whole_vectors, padded_matmul, tiled_matmul
from deepinfer_reference.handles import DenseExperts, DenseLinear, SlotBatch, own_handle

_RENORM_EPS = 1e-20
_SOFTPLUS_THRESHOLD = 20.0


def _softplus(x: Tensor) -> Tensor:
    return softplus(x, threshold=_SOFTPLUS_THRESHOLD)


def moe_gate(
    x: Tensor, weight: LinearWeight, bias: Tensor, *, num_experts_per_tok: int, route_scale: float
) -> Routing:
    logits = padded_matmul(x.float(), own_handle(weight, DenseLinear).matrix)
    score = in_whole_vectors(_softplus, logits)[: x.shape[0]].sqrt()
    order = torch.sort(score + bias, dim=1, descending=True, stable=True).indices
    ids = order[:, :num_experts_per_tok].contiguous()
    weights = score.gather(1, ids)
    total = weights.sum(1, keepdim=True) + _RENORM_EPS
    return Routing(ids, weights / total * route_scale)


def moe_dispatch(x: Tensor, routing: Routing, physical: Tensor, valid: Tensor) -> ExpertBatch:
    num_rows, k = routing.ids.shape
    num_experts = int(physical.max()) + 1
    ids, by_id = routing.ids.sort(dim=1)
    weights = routing.weights.gather(1, by_id)
    expert = torch.where(valid.unsqueeze(1), physical[ids], num_experts).flatten()
    order = torch.argsort(expert, stable=True)
    counts = torch.bincount(expert, minlength=num_experts + 1)[:num_experts].tolist()
    runs: list[tuple[int, int, int]] = []
    sorted_slots: list[int] = []
    end = 0
    for e, count in enumerate(counts):
        if count:
            start, end = end, end + count + -count % ROW_TILE
            runs.append((e, start, end))
            sorted_slots.extend(range(start, start + count))
    order = order[: len(sorted_slots)]
    slots = torch.tensor(sorted_slots, dtype=torch.int64)
    slot_rows = torch.zeros(end, dtype=torch.int64)
    slot_rows[slots] = torch.div(order, k, rounding_mode="floor")
    slot_weights = torch.zeros(end)
    slot_weights[slots] = weights.flatten()[order]
    slot_of = torch.full((num_rows * k,), -1, dtype=torch.int64)
    slot_of[order] = slots
    return SlotBatch(x, slot_rows, slot_weights, tuple(runs), slot_of.view(num_rows, k))


def moe_experts(batch: ExpertBatch, weights: ExpertWeights, swiglu_limit: float) -> Tensor:
    slots, packed = own_handle(batch, SlotBatch), own_handle(weights, DenseExperts)
    x = slots.x
    values = round_trip_a8(x) if packed.quantizes_input else x.float()
    gathered = values.index_select(0, slots.slot_rows)
    hidden = _by_expert(gathered, slots, packed.gate_up)
    # The projections are bf16 products in normative numerics, like every linear.
    activated = _clamped_swiglu(hidden.to(x.dtype), swiglu_limit)
    activated = (activated * slots.slot_weights.unsqueeze(1)).to(x.dtype)
    inner = round_trip_a8(activated) if packed.quantizes_input else activated.float()
    return _by_expert(inner, slots, packed.down).to(x.dtype)


def _by_expert(rows: Tensor, slots: SlotBatch, matrices: tuple[Tensor, ...]) -> Tensor:
    """Each run of slots times its expert's matrix; runs are whole row tiles."""
    result = rows.new_empty((rows.shape[0], matrices[0].shape[1]))
    lengths = [stop - start for _, start, stop in slots.runs]
    pieces = zip(slots.runs, rows.split(lengths), result.split(lengths), strict=True)
    for (expert, _, _), inputs, outputs in pieces:
        tiled_matmul(inputs, matrices[expert], out=outputs)
    return result


def moe_combine(outputs: Tensor, batch: ExpertBatch, shared: Tensor) -> Tensor:
    slots = own_handle(batch, SlotBatch).slots
    total = torch.zeros(shared.shape)
    if outputs.shape[0]:
        absent = (slots < 0).unsqueeze(-1)
        parts = outputs[slots.clamp_min(0)].float().masked_fill(absent, 0.0)
        for rank in range(slots.shape[1]):
            total = total + parts[:, rank]
    return (total + shared.float()).to(shared.dtype)


def _clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    return in_whole_vectors(silu, gate.clamp_max(limit)) * up.clamp(-limit, limit)


def swiglu(gate_up: Tensor, swiglu_limit: float) -> Tensor:
    return _clamped_swiglu(gate_up, swiglu_limit).to(gate_up.dtype)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(moe.moe_gate)(moe_gate)
    table.implements(moe.moe_dispatch)(moe_dispatch)
    table.implements(moe.moe_experts)(moe_experts)
    table.implements(moe.moe_combine)(moe_combine)
    table.implements(moe.swiglu)(swiglu)
