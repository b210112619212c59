"""Spec family on Triton kernels; the Markov step is composed of embed and linear_f32."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.handles import LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import spec
from deepinfer.device.ops.sampling import SampleParams, SampleWork
from deepinfer.device.ops.spec import Confidence, DraftPlan, Verified
from deepinfer.device.ops.state import RowLayout
from deepinfer_cuda_sm100.ops.quant import linear_f32
from deepinfer_cuda_sm100.ops.sampling import filter_logits
from deepinfer_kernels.spec import admit_triton, draft_triton, verify_triton


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


def verify_drafts(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    query_starts: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
) -> Verified:
    return Verified(
        *verify_triton.verify_drafts(
            filter_logits(logits, params, work),
            temperature=params.temperature,
            seeds=params.seeds,
            sample_index=params.sample_index,
            positions=params.positions,
            query_starts=query_starts,
            draft_ids=draft_ids,
            draft_logits=draft_logits,
        )
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
    table.implements(
        spec.verify_drafts,
        reason=f"{reason}; top-k and top-p order tokens by torch's stable sort",
    )(verify_drafts)
    table.implements(spec.draft_confidence, reason=reason)(draft_confidence)
    table.implements(spec.admit_drafts, reason=reason)(admit_drafts)
