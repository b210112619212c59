"""Spec family: where draft blocks lie, confidences, admission; the Markov step is composed."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.handles import LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import spec
from deepinfer.device.ops.spec import Confidence, DraftPlan
from deepinfer.device.ops.state import RowLayout
from deepinfer_ascend950.ops.quant import linear_f32


def draft_context(rows: RowLayout, num_accepted: Tensor, seq_slots: Tensor, *, ring: int) -> Tensor:
    accepted = num_accepted.index_select(0, rows.row_seq)
    written = rows.valid & (rows.row_offset < accepted) & (rows.row_offset >= accepted - ring)
    base = (seq_slots * ring).index_select(0, rows.row_seq)
    return torch.where(written, base + rows.positions % ring, -1)


def draft_plan(
    anchor_positions: Tensor,
    seq_slots: Tensor,
    floors: Tensor,
    valid: Tensor,
    *,
    block_size: int,
    window: int,
    ring: int,
) -> DraftPlan:
    anchor, is_valid = anchor_positions.unsqueeze(1), valid.unsqueeze(1)
    seen = anchor + torch.arange(-window, block_size, device=anchor.device)
    readable = is_valid & (seen >= floors.unsqueeze(1))
    slots = torch.where(readable, (seq_slots * ring).unsqueeze(1) + seen % ring, -1)
    block = torch.where(is_valid, seen[:, window:], 0)
    read = slots.unsqueeze(1).expand(-1, block_size, -1).flatten(0, 1)
    padded = is_valid.expand(-1, block_size)
    return DraftPlan(block.flatten(), slots[:, window:].flatten(), read, padded.flatten())


def draft_confidence(
    hidden: Tensor, features: Tensor, weight: LinearWeight, temperature: Tensor
) -> Confidence:
    logit = linear_f32(torch.cat((hidden, features), dim=1), weight).squeeze(1)
    return Confidence(logit, torch.sigmoid(logit / temperature))


def admit_drafts(survival: Tensor, available: Tensor, budget: Tensor) -> Tensor:
    num_seqs, num_drafts = survival.shape
    places = torch.arange(num_drafts, device=survival.device)
    admissible = (places < available.unsqueeze(1)) & (survival >= spec.SURVIVAL_FLOOR)
    key = torch.where(admissible, survival, 0.0)
    # Draft by draft: a stable sort then keeps the contract's order of ties.
    order = key.t().reshape(-1).sort(descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank.scatter_(0, order, torch.arange(num_drafts * num_seqs, device=order.device))
    chosen = (rank < budget).view(num_drafts, num_seqs).t() & admissible
    return chosen.sum(1)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    reason = "torch: integer arithmetic; nothing is read on the host"
    table.implements(spec.draft_context, reason=reason, layout="int64")(draft_context)
    table.implements(spec.draft_plan, reason=reason, layout="int64")(draft_plan)
    table.implements(
        spec.admit_drafts,
        reason="torch: one stable sort of the batch's drafts; nothing is read on the host",
        layout="fp32, int64",
    )(admit_drafts)
    table.implements(
        spec.draft_confidence,
        reason="torch: as quant/linear_f32",
        layout="fp32, HF32 off; the weight is kept in fp32 as well",
    )(draft_confidence)
