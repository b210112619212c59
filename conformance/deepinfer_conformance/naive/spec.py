"""Truths of the spec family: request by request, position by position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.device.ops.sampling import Purpose, SampleParams, SampleWork
from deepinfer.device.ops.spec import (
    SURVIVAL_FLOOR,
    Confidence,
    DraftPlan,
    MarkovStep,
    Verified,
)
from deepinfer.device.ops.state import RowLayout
from deepinfer.device.samples.canonical import CanonicalEmbedding, CanonicalLinear
from deepinfer_conformance.naive import stored
from deepinfer_conformance.naive.quant import embed, linear_f32
from deepinfer_conformance.naive.sampling import filter_logits, philox_uniform


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


def _softmax(row: list[float]) -> list[float]:
    best = max(row)
    shares = [math.exp(value - best) for value in row]
    total = math.fsum(shares)
    return [share / total for share in shares]


class _Row:
    """One row of a verification: its distribution and its random numbers."""

    def __init__(
        self, logits: Tensor, params: SampleParams, work: SampleWork, *, index: int
    ) -> None:
        self.params = SampleParams(*(column[index : index + 1] for column in params))
        self.kept = filter_logits(logits[index : index + 1], self.params, work)[0].tolist()
        self.target = _softmax(self.kept)
        self.temperature = float(self.params.temperature[0])

    def uniform(self, purpose: Purpose, num: int) -> list[float]:
        """Numbers of the row."""
        own = self.params
        drawn = philox_uniform(own.seeds, own.sample_index, own.positions, purpose, num)
        numbers: list[float] = drawn[0].tolist()
        return numbers

    def drafter(self, draft: int, logits: Tensor | None) -> list[float]:
        """Distribution that the draft of this row comes from."""
        if self.temperature == 0.0 or logits is None:
            return [float(token == draft) for token in range(len(self.kept))]
        return _softmax([value / self.temperature for value in logits.tolist()])

    def draw(self, scores: list[float], purpose: Purpose) -> int:
        """Gumbel-max, or the best at temperature 0."""
        if self.temperature > 0.0:
            noise = self.uniform(purpose, len(scores))
            scores = [z - math.log(-math.log1p(-u)) for z, u in zip(scores, noise, strict=True)]
        return scores.index(max(scores))


def _verify(rows: list[_Row], drafts: list[int], draft_logits: Tensor | None) -> list[int]:
    """Accepted drafts of one request and the token after them."""
    tokens: list[int] = []
    for place, row in enumerate(rows):
        draft = drafts[place] if place + 1 < len(rows) else -1
        if draft < 0:
            purpose = Purpose.BONUS if tokens else Purpose.SAMPLE
            return [*tokens, row.draw(row.kept, purpose)]
        drafter = row.drafter(draft, None if draft_logits is None else draft_logits[place])
        if row.uniform(Purpose.ACCEPT, 1)[0] * drafter[draft] < row.target[draft]:
            tokens.append(draft)
            continue
        residual = [max(p - q, 0.0) for p, q in zip(row.target, drafter, strict=True)]
        scores = [math.log(share) if share > 0.0 else -math.inf for share in residual]
        return [*tokens, row.draw(scores if any(residual) else row.kept, Purpose.RESIDUAL)]
    return tokens


def verify_drafts(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    query_starts: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
) -> Verified:
    """Request by request, draft by draft, with float64 probabilities."""
    tokens, accepted = [], []
    width = 1 + draft_ids.shape[1]
    for seq, drafts in enumerate(draft_ids.tolist()):
        first, stop = int(query_starts[seq]), int(query_starts[seq + 1])
        rows = [_Row(logits, params, work, index=index) for index in range(first, stop)]
        own = None if draft_logits is None else draft_logits[seq]
        found = _verify(rows, drafts, own)
        accepted.append(max(0, len(found) - 1))
        tokens.append(found + [-1] * (width - len(found)))
    return Verified(
        torch.tensor(tokens, dtype=torch.int64).view(len(tokens), width),
        torch.tensor(accepted, dtype=torch.int64),
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
