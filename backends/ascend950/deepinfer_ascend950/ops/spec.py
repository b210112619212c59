"""Spec family: where draft blocks lie, confidences, admission; the Markov step is composed."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.handles import LinearWeight
from deepinfer.device.op import OpTable
from deepinfer.device.ops import spec
from deepinfer.device.ops.sampling import Purpose, SampleParams, SampleWork
from deepinfer.device.ops.spec import Confidence, DraftPlan, Verified
from deepinfer.device.ops.state import RowLayout
from deepinfer_ascend950.ops.philox import philox_uniform, uniform
from deepinfer_ascend950.ops.quant import linear_f32
from deepinfer_ascend950.ops.sampling import filter_logits


def draft_context(rows: RowLayout, num_accepted: Tensor, seq_slots: Tensor, *, ring: int) -> Tensor:
    accepted = num_accepted.index_select(0, rows.row_seq)
    written = rows.valid & (rows.row_offset < accepted) & (rows.row_offset >= accepted - ring)
    base = (seq_slots * ring).index_select(0, rows.row_seq)
    return torch.where(written, base + rows.positions % ring, -1)


def verify_drafts(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    query_starts: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
) -> Verified:
    num_seqs, num_drafts = draft_ids.shape
    num_rows, vocab = logits.shape
    query_lens = query_starts[1:] - query_starts[:-1]
    if num_rows == 0 or num_seqs == 0:
        return Verified(draft_ids.new_full((num_seqs, 1 + num_drafts), -1), query_lens)
    kept = filter_logits(logits, params, work)
    places = torch.arange(1 + num_drafts, device=draft_ids.device)
    rows = (query_starts[:-1].unsqueeze(1) + places).clamp_max(num_rows - 1)
    present = (places[1:] < query_lens.unsqueeze(1)) & (draft_ids >= 0)
    asked, drafts = rows[:, :num_drafts].flatten(), draft_ids.clamp_min(0)
    columns = torch.arange(vocab, device=draft_ids.device)
    # [R * D, V]: what each draft was drawn from; a certain draft has all of it.
    drafter = (columns == drafts.flatten().unsqueeze(1)).float()
    heat = params.temperature.index_select(0, asked).unsqueeze(1)
    if draft_logits is not None:
        scaled = draft_logits.flatten(0, 1) / torch.where(heat > 0, heat, 1.0)
        drafter = torch.where(heat > 0, torch.softmax(scaled, -1), drafter)
    target = torch.softmax(kept, -1)
    seeds, samples, positions = (x.index_select(0, asked) for x in params[4:])
    drawn = philox_uniform(seeds, samples, positions, Purpose.ACCEPT, 1)
    column = drafts.flatten().unsqueeze(1)
    passes = drawn * drafter.gather(1, column) < target.index_select(0, asked).gather(1, column)
    num_accepted = (present & passes.view_as(present)).long().cumprod(1).sum(1)

    place = num_accepted.unsqueeze(1)
    row = rows.gather(1, place).squeeze(1)
    refused = torch.nn.functional.pad(present, (0, 1)).gather(1, place).squeeze(1)
    first = torch.arange(num_seqs, device=draft_ids.device) * num_drafts
    refusing = drafter.index_select(0, first + num_accepted.clamp_max(num_drafts - 1))
    residual = (target.index_select(0, row) - refusing).clamp_min(0.0)
    is_left = (refused & (residual > 0).any(1)).unsqueeze(1)
    scores = torch.where(is_left, torch.log(residual), kept.index_select(0, row))
    unrefused = torch.where(num_accepted > 0, int(Purpose.BONUS), int(Purpose.SAMPLE))
    purposes = torch.where(refused, int(Purpose.RESIDUAL), unrefused)
    seeds, samples, positions = (x.index_select(0, row) for x in params[4:])
    noise = uniform(seeds, samples, positions, purposes, vocab)
    noise = -torch.log(-torch.log1p(-noise))
    draws = (params.temperature.index_select(0, row) > 0).unsqueeze(1)
    newest = (scores + torch.where(draws, noise, 0.0)).argmax(-1).unsqueeze(1)
    tokens = torch.nn.functional.pad(draft_ids, (0, 1))
    tokens = torch.where(places < place, tokens, torch.where(places == place, newest, -1))
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
        spec.verify_drafts,
        reason="torch: no operator takes the drafts' distribution or these random numbers",
        layout="fp32, int64; every row draws, those of temperature 0 in vain",
    )(verify_drafts)
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
