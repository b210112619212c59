"""Reference of the mHC family."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import mhc
from deepinfer.device.ops.mhc import MhcMix, MhcWeights
from deepinfer_reference.gemm import pad_rows, padded_matmul, round_to
from deepinfer_reference.ops.norm import rmsnorm


def mhc_mix(
    streams: Tensor, weights: MhcWeights, *, norm_eps: float, hc_eps: float, num_iters: int
) -> MhcMix:
    num_rows, num_streams, _ = streams.shape
    flat = pad_rows(streams.flatten(1).float())
    statistic = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mix = padded_matmul(flat, weights.fn) * statistic
    m = num_streams
    scale, base = weights.scale, weights.base
    pre = torch.sigmoid(mix[:, :m] * scale[0] + base[:m]) + hc_eps
    post = 2.0 * torch.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = mix[:, 2 * m :] * scale[2] + base[2 * m :]
    comb = torch.softmax(logits.view(-1, m, m), dim=-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(num_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return MhcMix(pre[:num_rows], post[:num_rows], comb[:num_rows])


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams.float()).sum(1)


def mhc_collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    collapsed = round_to(_collapse(streams, pre), streams.dtype)
    return rmsnorm(collapsed, weight, eps).to(streams.dtype)


def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    total = post.unsqueeze(-1) * y.float().unsqueeze(1)
    source = streams.float()
    for i in range(streams.shape[1]):
        total = total + comb[:, i].unsqueeze(-1) * source[:, i : i + 1]
    return total.to(streams.dtype)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(mhc.mhc_mix)(mhc_mix)
    table.implements(mhc.mhc_collapse_norm)(mhc_collapse_norm)
    table.implements(mhc.mhc_expand)(mhc_expand)
