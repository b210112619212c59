"""Truths of the mhc family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.device.ops.mhc import MhcBoundary, MhcMix
from deepinfer.device.samples.canonical import CanonicalMhc, CanonicalVector
from deepinfer_conformance.naive import numbers, stored
from deepinfer_conformance.naive.norm import normalised
from deepinfer_conformance.naive.stored import Matrix


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


def _softmax(row: list[float]) -> list[float]:
    top = max(row)
    shares = [math.exp(value - top) for value in row]
    total = math.fsum(shares)
    return [share / total for share in shares]


def _scale_columns(comb: Matrix, eps: float) -> Matrix:
    totals = [math.fsum(row[j] for row in comb) + eps for j in range(len(comb))]
    return [[value / total for value, total in zip(row, totals, strict=True)] for row in comb]


def _scale_rows(comb: Matrix, eps: float) -> Matrix:
    return [[value / (math.fsum(row) + eps) for value in row] for row in comb]


def _sinkhorn(logits: Matrix, eps: float, num_iters: int) -> Matrix:
    comb = [[value + eps for value in _softmax(row)] for row in logits]
    comb = _scale_columns(comb, eps)
    for _ in range(num_iters - 1):
        comb = _scale_columns(_scale_rows(comb, eps), eps)
    return comb


def mhc_mix(
    streams: Tensor, weights: CanonicalMhc, *, norm_eps: float, hc_eps: float, num_iters: int
) -> MhcMix:
    """Row by row; all float64."""
    rows, m, _ = streams.shape
    fn = stored.parameter(weights.fn)
    scale, base = stored.vector(weights.scale), stored.vector(weights.base)
    pre, post, comb = [], [], []
    for flat in stored.matrix(streams.flatten(1)):
        mean_square = math.fsum(value * value for value in flat) / len(flat)
        statistic = 1.0 / math.sqrt(mean_square + norm_eps)
        mix = [math.fsum(a * b for a, b in zip(flat, line, strict=True)) * statistic for line in fn]
        # Outputs: m of pre, m of post, the rest of comb, each with its own scale.
        logits = [value * scale[min(at // m, 2)] + base[at] for at, value in enumerate(mix)]
        pre.append([_sigmoid(value) + hc_eps for value in logits[:m]])
        post.append([2.0 * _sigmoid(value) for value in logits[m : 2 * m]])
        square = [logits[2 * m + i * m : 2 * m + (i + 1) * m] for i in range(m)]
        comb.append(_sinkhorn(square, hc_eps, num_iters))

    def result(values: list[list[float]] | list[Matrix], *shape: int) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).view(rows, *shape)

    return MhcMix(result(pre, m), result(post, m), result(comb, m, m))


def _collapsed(streams: Tensor, pre: Tensor) -> Matrix:
    """Rows of weighted sums, rounded to the activation dtype."""
    _, m, width = streams.shape
    return [
        [
            numbers.to_activation(math.fsum(shares[i] * row[i][d] for i in range(m)), streams)
            for d in range(width)
        ]
        for shares, row in zip(stored.matrix(pre), streams.double().tolist(), strict=True)
    ]


def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Row by row; [T, D] in the streams' dtype."""
    rows, _, width = streams.shape
    summed = torch.tensor(_collapsed(streams, pre), dtype=torch.float64)
    return summed.view(rows, width).to(streams.dtype)


def mhc_collapse_norm(streams: Tensor, pre: Tensor, weight: CanonicalVector, eps: float) -> Tensor:
    """Row by row; the collapse is rounded before the norm; [T, D] in the streams' dtype."""
    rows, _, width = streams.shape
    weights = stored.vector(weight)
    result = [normalised(row, weights, eps) for row in _collapsed(streams, pre)]
    return torch.tensor(result, dtype=torch.float64).view(rows, width).to(streams.dtype)


def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Row by row, destination by destination; [T, M, D] in the streams' dtype."""
    rows, m, width = streams.shape
    outputs, weights, mixing = stored.matrix(y), stored.matrix(post), comb.double().tolist()
    result = torch.zeros(rows, m, width, dtype=torch.float64)
    for token, source in enumerate(streams.double().tolist()):
        for j in range(m):
            for d in range(width):
                terms = [mixing[token][i][j] * source[i][d] for i in range(m)]
                terms.append(weights[token][j] * outputs[token][d])
                result[token, j, d] = math.fsum(terms)
    return result.to(streams.dtype)


def mhc_boundary(
    y: Tensor,
    streams: Tensor,
    mix: MhcMix,
    weights: CanonicalMhc,
    norm_weight: CanonicalVector,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> MhcBoundary:
    """The three truths one after another."""
    after = mhc_expand(y, streams, mix.post, mix.comb)
    following = mhc_mix(after, weights, norm_eps=norm_eps, hc_eps=hc_eps, num_iters=num_iters)
    return MhcBoundary(after, following, mhc_collapse_norm(after, mix.pre, norm_weight, norm_eps))
