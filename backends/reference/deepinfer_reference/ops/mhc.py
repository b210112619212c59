"""Reference of the mHC family."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import mhc
from deepinfer.device.ops.mhc import MhcMix, MhcWeights
from deepinfer_reference.gemm import in_whole_vectors, pad_rows, padded_matmul, round_to
from deepinfer_reference.ops.norm import rmsnorm


@cache
def _sum_matrices(m: int) -> tuple[Tensor, Tensor]:
    """[m * m, m * m] matrices that put its row's (column's) sum in place of every entry.

    One small product replaces a reduction and a broadcast: the 39 normalisations of a mixing
    are bound by the number of calls.
    """
    ones, eye = torch.ones(m, m), torch.eye(m)
    return torch.kron(eye, ones), torch.kron(ones, eye)


@cache
def _scale_of_column(m: int) -> Tensor:
    """[2 m + m * m] which of the three scales (pre, post, comb) a column of the mix takes."""
    return torch.tensor([0] * m + [1] * m + [2] * (m * m))


def mhc_mix(
    streams: Tensor, weights: MhcWeights, *, norm_eps: float, hc_eps: float, num_iters: int
) -> MhcMix:
    num_rows, num_streams, _ = streams.shape
    flat = pad_rows(streams.flatten(1).float())
    statistic = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mix = padded_matmul(flat, weights.fn.t()) * statistic
    m = num_streams
    affine = mix * weights.scale.index_select(0, _scale_of_column(m)) + weights.base
    gates = in_whole_vectors(torch.sigmoid, affine[:, : 2 * m].contiguous())
    pre, post = gates[:, :m] + hc_eps, 2.0 * gates[:, m:]
    comb = torch.softmax(affine[:, 2 * m :].unflatten(1, (m, m)), dim=-1).flatten(1).add_(hc_eps)
    sums, eps = torch.empty_like(comb), torch.full_like(comb, hc_eps)
    row_sums, column_sums = _sum_matrices(m)
    comb.div_(torch.addmm(eps, comb, column_sums, out=sums))
    for _ in range(num_iters - 1):
        comb.div_(torch.addmm(eps, comb, row_sums, out=sums))
        comb.div_(torch.addmm(eps, comb, column_sums, out=sums))
    comb = comb.view(-1, m, m)
    return MhcMix(pre[:num_rows], post[:num_rows], comb[:num_rows])


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams.float()).sum(1)


def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return _collapse(streams, pre).to(streams.dtype)


def mhc_collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    collapsed = round_to(_collapse(streams, pre), streams.dtype)
    return rmsnorm(collapsed, weight, eps).to(streams.dtype)


def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    spread = post.unsqueeze(-1) * y.float().unsqueeze(1)
    mixed = torch.baddbmm(spread, comb.transpose(1, 2), streams.float())
    return mixed.to(streams.dtype)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(mhc.mhc_mix)(mhc_mix)
    table.implements(mhc.mhc_collapse)(mhc_collapse)
    table.implements(mhc.mhc_collapse_norm)(mhc_collapse_norm)
    table.implements(mhc.mhc_expand)(mhc_expand)
