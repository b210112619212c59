"""Reference of the spec family; the Markov step is composed of embed and linear_f32."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.handles import LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import spec
from deepinfer.device.ops.spec import Confidence, DraftPlan
from deepinfer.device.ops.state import RowLayout
from deepinfer_reference.gemm import in_whole_vectors
from deepinfer_reference.ops.quant import linear_f32


def draft_context(rows: RowLayout, num_accepted: Tensor, seq_slots: Tensor, *, ring: int) -> Tensor:
    accepted = num_accepted[rows.row_seq]
    kept = rows.valid & (rows.row_offset < accepted) & (rows.row_offset >= accepted - ring)
    return torch.where(kept, seq_slots[rows.row_seq] * ring + rows.positions % ring, -1)


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
    anchors, base = anchor_positions.unsqueeze(1), (seq_slots * ring).unsqueeze(1)
    seen = anchors + torch.arange(-window, block_size)
    slots = torch.where((seen >= floors.unsqueeze(1)) & valid.unsqueeze(1), base + seen % ring, -1)
    positions = torch.where(valid.unsqueeze(1), seen[:, window:], 0)
    return DraftPlan(
        positions.flatten(),
        slots[:, window:].flatten(),
        slots.repeat_interleave(block_size, 0),
        valid.repeat_interleave(block_size),
    )


def draft_confidence(
    hidden: Tensor, features: Tensor, weight: LinearWeight, temperature: Tensor
) -> Confidence:
    logit = linear_f32(torch.cat((hidden, features), dim=1), weight).squeeze(1)
    return Confidence(logit, in_whole_vectors(torch.sigmoid, logit / temperature))


def admit_drafts(survival: Tensor, available: Tensor, budget: Tensor) -> Tensor:
    num_seqs, num_drafts = survival.shape
    admissible = torch.arange(num_drafts) < available.unsqueeze(1)
    admissible &= survival >= spec.SURVIVAL_FLOOR
    # Draft by draft, so that a stable sort leaves ties in the order of the contract.
    key = torch.where(admissible, survival, 0.0).T.flatten()
    order = torch.sort(key, descending=True, stable=True).indices
    chosen = torch.zeros(num_drafts * num_seqs, dtype=torch.bool)
    chosen[order] = torch.arange(len(order)) < budget
    return (chosen.view(num_drafts, num_seqs).T & admissible).sum(1)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(spec.draft_context)(draft_context)
    table.implements(spec.draft_plan)(draft_plan)
    table.implements(spec.draft_confidence)(draft_confidence)
    table.implements(spec.admit_drafts)(admit_drafts)
