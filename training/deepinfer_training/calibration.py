"""Confidence of the drafter against what the target accepts: rollouts, temperatures, measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_training.drafter import Anchors, draft_greedily
from deepinfer_training.evaluation import Model

_BINS = 15
_GRID_POINTS = 41
_PROMPTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Greedy continuations and what the drafter says at every position of them.

    Attributes:
        accepted: [B, P] int64 drafts that the target would accept with the anchor at a position.
        confidence_logits: [B, P, G] fp32.
        domains: [B] int64.
    """

    accepted: Tensor
    confidence_logits: Tensor
    domains: Tensor


@torch.no_grad()
def draft_over(
    model: Model,
    parameters: Mapping[str, Tensor],
    continued: Tensor,
    prompt_length: int,
    domains: Tensor,
) -> Rollouts:
    """Draft at every generated position but the last block's, verify against the continuation.

    Args:
        model: the target that made the continuations.
        parameters: of the drafter and the target's embedding and head.
        continued: [B, N] int64 prompts and greedy continuations.
        prompt_length: tokens of every prompt.
        domains: [B] int64.
    """
    size, total = model.arch.dspark_block_size, continued.shape[1]
    tile = 2 * model.arch.sliding_window
    length = -(-total // tile) * tile
    positions = torch.arange(prompt_length, total - size, device=model.device)
    rotation = model.planner.plain_rotation(length + size)
    accepted, logits = [], []
    for part in continued.split(_PROMPTS_AT_ONCE):
        ids = torch.nn.functional.pad(part, (0, length - total), value=model.arch.pad_token_id)
        documents = torch.zeros_like(ids)
        taps = model.run(ids, documents).taps
        anchors = Anchors(positions.expand(len(part), -1), documents, rotation)
        drafts = draft_greedily(parameters, model.arch, ids, taps, anchors, model.numerics)
        offsets = positions.unsqueeze(1) + torch.arange(1, size + 1, device=model.device)
        truth = ids[:, offsets.flatten()].view_as(drafts.tokens)
        accepted.append((drafts.tokens == truth).long().cumprod(-1).sum(-1))
        logits.append(drafts.confidence_logits)
    return Rollouts(torch.cat(accepted).cpu(), torch.cat(logits).cpu(), domains.cpu())


def mean_accepted(accepted: Tensor) -> float:
    """Mean accepted drafts of the rounds that decoding would make: [B, P] -> mean over rounds."""
    rounds, total = 0, 0
    for row in accepted.tolist():
        position = 0
        while position < len(row):
            rounds, total = rounds + 1, total + row[position]
            position += row[position] + 1
    return total / max(1, rounds)


def fit_temperatures(logits: Tensor, accepted: Tensor) -> list[float]:
    """Sequential temperatures, one a slot.

    Slot by slot, earlier ones fixed, the grid value with the smallest calibration error of the
    survival probability against "this and all earlier drafts were accepted".

    Args:
        logits: [N, G] fp32.
        accepted: [N] int64.
    Source: DSpark, sequential temperature scaling.
    """
    grid = torch.logspace(-1.0, 1.0, _GRID_POINTS)
    survival = torch.ones(len(logits))
    temperatures = []
    for slot in range(logits.shape[1]):
        happened = (accepted > slot).float()
        options = survival.unsqueeze(1) * torch.sigmoid(logits[:, slot : slot + 1] / grid)
        errors = torch.stack([calibration_error(column, happened) for column in options.T])
        best = int(errors.argmin())
        temperatures.append(float(grid[best]))
        survival = options[:, best]
    return temperatures


def survivals(logits: Tensor, temperatures: list[float]) -> Tensor:
    """[N, G] probability that a slot and all before it are accepted."""
    return torch.sigmoid(logits / torch.tensor(temperatures)).cumprod(1)


def calibration_error(probability: Tensor, happened: Tensor) -> Tensor:
    """Expected calibration error of [N] probabilities in 15 bins of equal width."""
    bins = (probability * _BINS).long().clamp(max=_BINS - 1)
    counts = torch.bincount(bins, minlength=_BINS).float()
    gaps = torch.zeros(_BINS).index_add_(0, bins, probability - happened)
    return gaps.abs().sum() / counts.sum()


def auroc(logits: Tensor, happened: Tensor) -> float:
    """Area under the ROC curve of [N] scores; ties count half."""
    positive = int(happened.sum())
    negative = len(happened) - positive
    if positive == 0 or negative == 0:
        return float("nan")
    _, inverse, counts = torch.unique(logits, return_inverse=True, return_counts=True)
    upper = counts.cumsum(0).double()
    ranks = (upper - (counts.double() - 1) / 2)[inverse]
    won = float(ranks[happened.bool()].sum()) - positive * (positive + 1) / 2
    return won / (positive * negative)
