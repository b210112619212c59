"""How well confidences foretell acceptance: rounds, calibration error, AUROC, temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

_BINS = 15
_GRID_POINTS = 41


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What the drafter says at every position of greedy answers, and what the target thinks of it.

    Rows belong to one answer each, columns to its anchors in order.

    Attributes:
        accepted: [B, P] int64 drafts that greedy verification accepts after an anchor.
        num_left: [B, P] int64 tokens of the answer after an anchor, at most G; 0 is padding.
        features: [B, P, G, N] fp32, what the confidence head reads.
        domains: [B] int64.
    """

    accepted: Tensor
    num_left: Tensor
    features: Tensor
    domains: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name, for a file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def judged(self) -> Tensor:
        """[B, P, G] bool: all drafts before a slot are accepted, and the answer goes on."""
        slots = torch.arange(self.features.shape[2])
        return (self.accepted.unsqueeze(-1) >= slots) & (self.num_left.unsqueeze(-1) > slots)

    def right(self) -> Tensor:
        """[B, P, G] bool: a slot's draft and all before it are accepted."""
        return self.accepted.unsqueeze(-1) > torch.arange(self.features.shape[2])

    def logits(self, head: Tensor) -> Tensor:
        """[B, P, G] fp32 confidence logits by head [1, N]."""
        return self.features @ head.squeeze(0)


def accepted_drafts(drafts: Tensor, ids: Tensor, positions: Tensor, num_left: Tensor) -> Tensor:
    """[B, P] int64 drafts that greedy verification accepts.

    Args:
        drafts: [B, P, G] int64.
        ids: [B, T] int64 text that greedy decoding wrote.
        positions: [B, P] int64 anchors in it.
        num_left: [B, P] int64 tokens of the answer behind each anchor.
    """
    size = drafts.shape[2]
    ahead = positions.unsqueeze(-1) + torch.arange(1, size + 1, device=ids.device)
    truth = ids.gather(1, ahead.flatten(1)).view_as(drafts)
    there = torch.arange(size, device=ids.device) < num_left.unsqueeze(-1)
    return ((drafts == truth) & there).long().cumprod(-1).sum(-1)


def mean_accepted(accepted: Tensor, num_left: Tensor) -> float:
    """Mean accepted drafts of the rounds that decoding would make.

    Args:
        accepted: [B, P] int64 at every anchor of an answer.
        num_left: [B, P] int64; an answer ends at its first 0.
    """
    rounds, total = 0, 0
    for counts, left in zip(accepted.tolist(), num_left.tolist(), strict=True):
        position = 0
        while position < len(counts) and left[position]:
            rounds, total = rounds + 1, total + counts[position]
            position += counts[position] + 1
    return total / max(1, rounds)


def fit_temperatures(logits: Tensor, accepted: Tensor, num_left: Tensor) -> list[float]:
    """Sequential temperatures, one a slot.

    Slot by slot, earlier ones fixed, the grid value with the smallest calibration error of the
    survival probability against "this and all earlier drafts were accepted".

    Args:
        logits: [N, G] fp32.
        accepted: [N] int64.
        num_left: [N] int64; slots from there on are not counted.
    Source: DSpark, sequential temperature scaling.
    """
    grid = torch.logspace(-1.0, 1.0, _GRID_POINTS)
    survival = torch.ones(len(logits))
    temperatures = []
    for slot in range(logits.shape[1]):
        counted, happened = num_left > slot, (accepted > slot).float()
        options = survival.unsqueeze(1) * torch.sigmoid(logits[:, slot : slot + 1] / grid)
        errors = torch.stack(
            [calibration_error(column[counted], happened[counted]) for column in options.T]
        )
        best = int(errors.argmin())
        temperatures.append(float(grid[best]))
        survival = options[:, best]
    return temperatures


def survivals(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
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


def measure(
    learnt: Rollouts, held: Rollouts, head: Tensor, domain_names: Sequence[str]
) -> dict[str, object]:
    """Fit temperatures on some answers, measure on others: figures of sts.json.

    Args:
        learnt: answers that the temperatures are fitted to.
        held: other answers, of all domains in equal number.
        head: [1, N] weight of the confidence head.
        domain_names: by number.
    """
    size = held.features.shape[2]
    temperatures = fit_temperatures(
        learnt.logits(head).flatten(0, 1), learnt.accepted.flatten(), learnt.num_left.flatten()
    )
    logits, happened = held.logits(head).flatten(0, 1), held.right().flatten(0, 1).float()
    left = held.num_left.flatten()

    def errors(values: Sequence[float]) -> list[float]:
        survival = survivals(logits, values)
        return [
            round(float(calibration_error(survival[left > k, k], happened[left > k, k])), 5)
            for k in range(size)
        ]

    judged = held.judged()
    by_domain = {}
    for i, name in enumerate(domain_names):
        rows = held.domains == i
        by_domain[name] = round(mean_accepted(held.accepted[rows], held.num_left[rows]), 3)
    return {
        "num_fitted": int((learnt.num_left > 0).sum()),
        "num_measured": int((left > 0).sum()),
        "temperatures": [round(t, 5) for t in temperatures],
        "ece_before": errors([1.0] * size),
        "ece_after": errors(temperatures),
        "auroc": round(auroc(held.logits(head)[judged], held.right()[judged]), 4),
        "mean_accepted": round(mean_accepted(held.accepted, held.num_left), 3),
        "mean_accepted_by_domain": by_domain,
    }
