"""Spec family on Triton kernels; the Markov step is composed of embed and linear_f32."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.handles import LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import spec
from deepinfer.device.ops.spec import Confidence, DraftPlan
from deepinfer.device.ops.state import RowLayout
from deepinfer_cuda_sm100.ops.quant import linear_f32
from deepinfer_kernels.spec import admit_triton, draft_triton


def draft_context(rows: RowLayout, num_accepted: Tensor, seq_slots: Tensor, *, ring: int) -> Tensor:
    return draft_triton.draft_context(
        rows.row_seq,
        rows.row_offset,
        rows.positions,
        rows.valid,
        num_accepted,
        seq_slots,
        ring=ring,
    )


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
    return DraftPlan(
        *draft_triton.draft_plan(
            anchor_positions,
            seq_slots,
            floors,
            valid,
            block_size=block_size,
            window=window,
            ring=ring,
        )
    )


def draft_confidence(
    hidden: Tensor, features: Tensor, weight: LinearWeight, temperature: Tensor
) -> Confidence:
    logit = linear_f32(torch.cat((hidden, features), dim=1), weight).squeeze(1)
    return Confidence(logit, draft_triton.probability(logit, temperature))


def admit_drafts(survival: Tensor, available: Tensor, budget: Tensor) -> Tensor:
    return admit_triton.admit_drafts(survival, available, budget, floor=spec.SURVIVAL_FLOOR)


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(spec.draft_context, reason=reason)(draft_context)
    table.implements(spec.draft_plan, reason=reason)(draft_plan)
    table.implements(spec.draft_confidence, reason=reason)(draft_confidence)
    table.implements(spec.admit_drafts, reason=reason)(admit_drafts)
