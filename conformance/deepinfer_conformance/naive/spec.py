"""Truths of the spec family: request by request, position by position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.device.ops.spec import SURVIVAL_FLOOR, Confidence, DraftPlan, MarkovStep
from deepinfer.device.ops.state import RowLayout
from deepinfer.device.samples.canonical import CanonicalEmbedding, CanonicalLinear
from deepinfer_conformance.naive import stored
from deepinfer_conformance.naive.quant import embed, linear_f32


def draft_context(rows: RowLayout, num_accepted: Tensor, seq_slots: Tensor, *, ring: int) -> Tensor:
    """Row by row; [T] int64."""
    result = []
    for seq, offset, position, valid in zip(
        rows.row_seq.tolist(),
        rows.row_offset.tolist(),
        rows.positions.tolist(),
        rows.valid.tolist(),
        strict=True,
    ):
        accepted, slot = int(num_accepted[seq]), int(seq_slots[seq])
        newest = range(max(0, accepted - ring), accepted)
        result.append(slot * ring + position % ring if valid and offset in newest else -1)
    return torch.tensor(result, dtype=torch.int64)


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
    """Block by block."""
    positions, write, read, present = [], [], [], []
    for anchor, slot, floor, drafts in zip(
        anchor_positions.tolist(),
        seq_slots.tolist(),
        floors.tolist(),
        valid.tolist(),
        strict=True,
    ):
        block = [anchor + index for index in range(block_size)]
        place = [slot * ring + position % ring for position in block]
        context = [
            slot * ring + position % ring if position >= floor else -1
            for position in range(anchor - window, anchor)
        ]
        for index in range(block_size):
            positions.append(block[index] if drafts else 0)
            write.append(place[index] if drafts else -1)
            read.append(context + place if drafts else [-1] * (window + block_size))
            present.append(drafts)
    return DraftPlan(
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(write, dtype=torch.int64),
        torch.tensor(read, dtype=torch.int64).view(len(write), window + block_size),
        torch.tensor(present, dtype=torch.bool),
    )


def markov_step(
    base: Tensor, tokens: Tensor, embedding: CanonicalEmbedding, head: CanonicalLinear
) -> MarkovStep:
    """Row by row; both outputs float64."""
    features = embed(tokens, embedding)
    return MarkovStep(base.double() + linear_f32(features, head), features)


def draft_confidence(
    hidden: Tensor, features: Tensor, weight: CanonicalLinear, temperature: Tensor
) -> Confidence:
    """Row by row; both outputs float64."""
    line = stored.weight(weight.parts[0])[0]
    logits = [
        math.fsum(a * b for a, b in zip([*row, *tail], line, strict=True))
        for row, tail in zip(stored.matrix(hidden), stored.matrix(features), strict=True)
    ]
    shares = [
        1.0 / (1.0 + math.exp(-logit / scale))
        for logit, scale in zip(logits, temperature.double().tolist(), strict=True)
    ]
    return Confidence(
        torch.tensor(logits, dtype=torch.float64), torch.tensor(shares, dtype=torch.float64)
    )


def admit_drafts(survival: Tensor, available: Tensor, budget: Tensor) -> Tensor:
    """One draft after another, always the best of those that are next in their requests."""
    rows, limits = survival.tolist(), available.tolist()
    admitted = [0] * len(rows)
    for _ in range(int(budget)):
        best = None
        for seq, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            place = admitted[seq]
            if place < limit and row[place] >= SURVIVAL_FLOOR:
                rank = (-row[place], place, seq)
                best = rank if best is None else min(best, rank)
        if best is None:
            break
        admitted[best[2]] += 1
    return torch.tensor(admitted, dtype=torch.int64)
