"""Reference of the spec family; the Markov step is composed of embed and linear_f32."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.handles import LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import spec
from deepinfer.device.ops.sampling import Purpose, SampleParams, SampleWork
from deepinfer.device.ops.spec import Confidence, DraftPlan, Verified
from deepinfer.device.ops.state import RowLayout
from deepinfer_reference.gemm import in_whole_vectors
from deepinfer_reference.ops.philox import philox_uniform
from deepinfer_reference.ops.quant import linear_f32
from deepinfer_reference.ops.sampling import filter_logits, gumbel_noise


def draft_context(rows: RowLayout, num_accepted: Tensor, seq_slots: Tensor, *, ring: int) -> Tensor:
    accepted = num_accepted[rows.row_seq]
    kept = rows.valid & (rows.row_offset < accepted) & (rows.row_offset >= accepted - ring)
    return torch.where(kept, seq_slots[rows.row_seq] * ring + rows.positions % ring, -1)


def verify_drafts(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    query_starts: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
) -> Verified:
    num_seqs, num_drafts = draft_ids.shape
    query_lens = query_starts.diff()
    if logits.shape[0] == 0:
        return Verified(draft_ids.new_full((num_seqs, 1 + num_drafts), -1), query_lens)
    places = torch.arange(1 + num_drafts)
    rows = (query_starts[:-1].unsqueeze(1) + places).clamp_max(logits.shape[0] - 1)
    present = (places[1:] < query_lens.unsqueeze(1)) & (draft_ids >= 0)
    asked = (rows[:, :num_drafts], draft_ids.clamp_min(0))
    if work is SampleWork.GREEDY:
        best = logits.argmax(-1)
        num_accepted = _leading(present & (best[asked[0]] == draft_ids))
        newest = best[rows.gather(1, num_accepted.unsqueeze(1)).squeeze(1)]
        return _verified(draft_ids, num_accepted, newest, query_lens)

    kept = filter_logits(logits, params, work).double()
    target = torch.softmax(kept, -1)
    certain = params.temperature[asked[0]] == 0
    drafter = torch.nn.functional.one_hot(asked[1], logits.shape[1]).double()
    if draft_logits is not None:
        scale = torch.where(certain, 1.0, params.temperature[asked[0]]).double().unsqueeze(2)
        drawn = torch.softmax(draft_logits.double() / scale, -1)
        drafter = torch.where(certain.unsqueeze(2), drafter, drawn)
    flat = asked[0].flatten()
    uniform = philox_uniform(
        params.seeds[flat], params.sample_index[flat], params.positions[flat], Purpose.ACCEPT, 1
    ).view(draft_ids.shape)
    proposed = drafter.gather(2, asked[1].unsqueeze(2)).squeeze(2)
    passes = uniform.double() * proposed < target[asked]
    num_accepted = _leading(present & passes)

    row = rows.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    refused = torch.nn.functional.pad(present, (0, 1))
    refused = refused.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    drafter = torch.nn.functional.pad(drafter, (0, 0, 0, 1))
    residual = (target[row] - drafter[torch.arange(num_seqs), num_accepted]).clamp_min(0.0)
    is_left = refused & (residual > 0).any(1)
    scores = torch.where(is_left.unsqueeze(1), residual.log(), kept[row])
    purposes = (
        (Purpose.RESIDUAL, refused),
        (Purpose.BONUS, ~refused & (num_accepted > 0)),
        (Purpose.SAMPLE, ~refused & (num_accepted == 0)),
    )
    for purpose, members in purposes:
        drawing = (members & (params.temperature[row] > 0)).nonzero().flatten()
        own = SampleParams(*(column[row[drawing]] for column in params))
        scores[drawing] += gumbel_noise(own, purpose, logits.shape[1])
    return _verified(draft_ids, num_accepted, scores.argmax(-1), query_lens)


def _leading(accepted: Tensor) -> Tensor:
    """[R] how many of [R, D] hold before the first that does not."""
    return accepted.cumprod(1).sum(1)


def _verified(
    draft_ids: Tensor, num_accepted: Tensor, newest: Tensor, query_lens: Tensor
) -> Verified:
    accepted = num_accepted.unsqueeze(1)
    places = torch.arange(1 + draft_ids.shape[1])
    tokens = torch.nn.functional.pad(draft_ids, (0, 1))
    tokens = torch.where(places < accepted, tokens, -1).scatter(1, accepted, newest.unsqueeze(1))
    return Verified(torch.where(query_lens.unsqueeze(1) > 0, tokens, -1), num_accepted)


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
    table.implements(spec.verify_drafts)(verify_drafts)
    table.implements(spec.draft_confidence)(draft_confidence)
    table.implements(spec.admit_drafts)(admit_drafts)
