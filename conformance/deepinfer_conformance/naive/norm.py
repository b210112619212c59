"""Truths of the norm family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.device.samples.canonical import CanonicalVector
from deepinfer_conformance.naive.stored import matrix, vector


def normalised(row: list[float], weight: list[float], eps: float) -> list[float]:
    """One row, weighted, in float64."""
    mean_square = math.fsum(value * value for value in row) / len(row)
    scale = 1.0 / math.sqrt(mean_square + eps)
    return [w * (value * scale) for w, value in zip(weight, row, strict=True)]


def rmsnorm(x: Tensor, weight: CanonicalVector, eps: float) -> Tensor:
    """Row by row; [..., N] in x's dtype."""
    weights = vector(weight)
    rows = [normalised(row, weights, eps) for row in matrix(x.reshape(-1, x.shape[-1]))]
    return torch.tensor(rows, dtype=torch.float64).view(x.shape).to(x.dtype)
