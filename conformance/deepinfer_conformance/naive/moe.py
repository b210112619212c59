"""Truths of the moe family; slots are never laid out, pairs are computed where they stand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.device.ops.moe import Routing
from deepinfer.device.samples.canonical import (
    CanonicalBatch,
    CanonicalExperts,
    CanonicalLinear,
    CanonicalSlots,
    CanonicalVector,
)
from deepinfer.device.samples.moe import PROBE_LIMIT, probe_experts
from deepinfer_conformance.naive import numbers, stored
from deepinfer_conformance.naive.quant import product, quantised_product


def _affinities(x: Tensor, weight: CanonicalLinear) -> list[list[float]]:
    """sqrt(softplus(logit)) of every row and expert."""
    logits = product(stored.matrix(x), stored.weight(weight.parts[0]))
    return [[math.sqrt(z if z > 20.0 else math.log1p(math.exp(z))) for z in row] for row in logits]


def _biased(
    x: Tensor,
    weight: CanonicalLinear,
    bias: CanonicalVector,
    *,
    num_experts_per_tok: int,
    route_scale: float,
) -> dict[str, Tensor]:
    """Scores by which experts are chosen."""
    shift = stored.vector(bias)
    rows = [
        [score + b for score, b in zip(row, shift, strict=True)] for row in _affinities(x, weight)
    ]
    return {"ids": torch.tensor(rows, dtype=torch.float64).view(x.shape[0], len(shift))}


SELECTION_SCORES = {"moe_gate": _biased}
"""Scores by which each op chooses, per output."""


def _best_first(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda at: (-scores[at], at))


def moe_gate(
    x: Tensor,
    weight: CanonicalLinear,
    bias: CanonicalVector,
    *,
    num_experts_per_tok: int,
    route_scale: float,
) -> Routing:
    """Row by row with a full sort; weights float64."""
    shift = stored.vector(bias)
    ids: list[list[int]] = []
    weights: list[list[float]] = []
    for row in _affinities(x, weight):
        biased = [score + b for score, b in zip(row, shift, strict=True)]
        chosen = _best_first(biased)[:num_experts_per_tok]
        total = math.fsum(row[e] for e in chosen) + 1e-20
        ids.append(chosen)
        weights.append([row[e] / total * route_scale for e in chosen])
    shape = (x.shape[0], num_experts_per_tok)
    return Routing(
        torch.tensor(ids, dtype=torch.int64).view(shape),
        torch.tensor(weights, dtype=torch.float64).view(shape),
    )


def _activated(gate: float, up: float, limit: float) -> float:
    gate = min(gate, limit)
    silu = gate / (1.0 + math.exp(-gate)) if gate > -700.0 else 0.0
    return silu * max(min(up, limit), -limit)


def _expert(
    row: list[float],
    experts: CanonicalExperts,
    expert: int,
    *,
    routing_weight: float,
    limit: float,
    like: Tensor,
) -> list[float]:
    """One row through one physical expert, rounded as the activation dtype of `like` asks."""
    normative = numbers.is_normative(like)
    gate, up = (
        quantised_product([row], part[expert], normative=normative)[0]
        for part in (experts.gate, experts.up)
    )
    # Each projection is a product of the activation dtype, as every linear is.
    inner = [
        numbers.to_activation(
            _activated(numbers.to_activation(g, like), numbers.to_activation(u, like), limit)
            * routing_weight,
            like,
        )
        for g, u in zip(gate, up, strict=True)
    ]
    output = quantised_product([inner], experts.down[expert], normative=normative)[0]
    return [numbers.to_activation(value, like) for value in output]


def _routed_sum(
    batch: CanonicalBatch,
    experts: CanonicalExperts,
    limit: float,
    *,
    fill: list[float] | None,
    shared: Tensor,
) -> Tensor:
    """Sum of every valid row's pairs plus `shared`, one rounding; [T, D] in x's dtype."""
    rows = stored.matrix(shared)
    for token, row in enumerate(stored.matrix(batch.x)):
        if not bool(batch.valid[token]):
            continue
        pairs = zip(
            batch.routing.ids[token].tolist(), batch.routing.weights[token].tolist(), strict=True
        )
        for logical, weight in pairs:
            output = fill or _expert(
                row,
                experts,
                int(batch.physical[logical]),
                routing_weight=weight,
                limit=limit,
                like=batch.x,
            )
            rows[token] = [a + b for a, b in zip(rows[token], output, strict=True)]
    return torch.tensor(rows, dtype=torch.float64).view(shared.shape).to(shared.dtype)


def moe_dispatch(x: Tensor, routing: Routing, physical: Tensor, valid: Tensor) -> Tensor:
    """The batch seen through the probe experts and a combine without shared expert."""
    experts = probe_experts(int(physical.max()) + 1, x.shape[1])
    batch = CanonicalBatch(x, routing, physical, valid)
    return _routed_sum(batch, experts, PROBE_LIMIT, fill=None, shared=torch.zeros_like(x))


def moe_experts(batch: CanonicalBatch, weights: CanonicalExperts, swiglu_limit: float) -> Tensor:
    """Slot outputs seen through a combine without shared expert."""
    nothing = torch.zeros_like(batch.x)
    return _routed_sum(batch, weights, swiglu_limit, fill=None, shared=nothing)


def moe_combine(outputs: CanonicalSlots, batch: CanonicalBatch, shared: Tensor) -> Tensor:
    """Row by row; [T, D] in the dtype of `shared`."""
    fill = None if outputs.fill is None else stored.vector(outputs.fill)
    return _routed_sum(batch, outputs.experts, outputs.swiglu_limit, fill=fill, shared=shared)


def swiglu(gate_up: Tensor, swiglu_limit: float) -> Tensor:
    """Value by value; [T, I] in the input's dtype."""
    width = gate_up.shape[1] // 2
    rows = [
        [_activated(row[at], row[width + at], swiglu_limit) for at in range(width)]
        for row in stored.matrix(gate_up)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), width).to(gate_up.dtype)
