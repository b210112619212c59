"""The outcome of one comparison."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an output is right, and how far off it is.

    Attributes:
        passed: within the bound.
        error: worst error, in the unit of the kind (count, ulp, or share of the bound).
        bound: what is allowed, in the same unit.
        where: the worst place with both values, or what is wrong in words; empty when equal.
    """

    passed: bool
    error: float
    bound: float
    where: str

    @property
    def ratio(self) -> float:
        """Error in units of the bound; a bound of 0 makes any error infinite."""
        if self.bound > 0.0:
            return self.error / self.bound
        return 0.0 if self.error == 0.0 else math.inf

    @property
    def row(self) -> int | None:
        """First index of the worst place; None where the words name none."""
        found = re.match(r"at \[(\d+)", self.where) or re.match(r"row (\d+)", self.where)
        return int(found.group(1)) if found else None


def place(excess: Tensor, value: Tensor, truth: Tensor) -> str:
    """Index and both values at the largest excess; empty when there is none."""
    if excess.numel() == 0 or float(excess.max()) == 0.0:
        return ""
    at = int(excess.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), excess.shape)]
    found, expected = value.flatten()[at].item(), truth.flatten()[at].item()
    return f"at {index}: {found!r}, expected {expected!r}"


def shape_verdict(value: Tensor, truth: Tensor) -> Verdict | None:
    """A failed verdict for a wrong shape or dtype; float64 truths accept any float dtype."""
    if value.shape != truth.shape:
        words = f"shape {tuple(value.shape)}, expected {tuple(truth.shape)}"
        return Verdict(False, float("inf"), 0.0, words)
    free = truth.dtype is torch.float64 and value.dtype.is_floating_point
    if value.dtype is not truth.dtype and not free:
        return Verdict(False, float("inf"), 0.0, f"dtype {value.dtype}, expected {truth.dtype}")
    return None
