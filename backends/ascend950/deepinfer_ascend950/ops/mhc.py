"""mHC family."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as matmul

from deepinfer.device.op import OpTable
from deepinfer.device.ops import mhc
from deepinfer.device.ops.mhc import MhcMix, MhcWeights
from deepinfer_ascend950.operators import NpuOperators

# What the pages of npu_mhc_pre, npu_mhc_sinkhorn and npu_mhc_post allow.
_STREAMS = (4, 6, 8)
_WIDTH_MULTIPLE, _MAX_WIDTH, _MAX_ITERS = 16, 16384, 100


def _has_operators(streams: Tensor) -> bool:
    """Whether the mHC operators are documented for streams of this shape and dtype."""
    num_rows, num_streams, width = streams.shape
    return (
        streams.dtype is torch.bfloat16
        and num_rows > 0
        and num_streams in _STREAMS
        and width % _WIDTH_MULTIPLE == 0
        and width <= _MAX_WIDTH
    )


def _project(
    streams: Tensor, weights: MhcWeights, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post and comb logits in torch, for shapes without an operator and fp32 streams."""
    m = streams.shape[1]
    flat = streams.float().flatten(1)
    statistic = (flat.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    mix = matmul(flat, weights.fn) * statistic
    scale, base = weights.scale, weights.base
    pre = torch.sigmoid(mix[:, :m] * scale[0] + base[:m]) + hc_eps
    post = 2.0 * torch.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = mix[:, 2 * m :] * scale[2] + base[2 * m :]
    return pre, post, logits.unflatten(1, (m, m))


def _sinkhorn(logits: Tensor, eps: float, num_iters: int) -> Tensor:
    """Doubly stochastic matrices in torch."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


class MhcOps:
    """Mixing, collapse with norm, expansion."""

    def __init__(self, npu: NpuOperators) -> None:
        self._npu = npu

    def mhc_mix(
        self,
        streams: Tensor,
        weights: MhcWeights,
        *,
        norm_eps: float,
        hc_eps: float,
        num_iters: int,
    ) -> MhcMix:
        if not _has_operators(streams) or num_iters > _MAX_ITERS:
            pre, post, logits = _project(streams, weights, norm_eps, hc_eps)
            return MhcMix(pre, post, _sinkhorn(logits, hc_eps, num_iters))
        pre, post, logits = self._npu.mhc_pre(
            streams, weights.fn, weights.scale, weights.base, norm_eps=norm_eps, hc_eps=hc_eps
        )
        return MhcMix(pre, post, self._npu.mhc_sinkhorn(logits, hc_eps, num_iters))

    def mhc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        return (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)

    def mhc_collapse_norm(self, streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
        collapsed = self.mhc_collapse(streams, pre)
        return self._npu.rms_norm(collapsed.float(), weight, eps).to(streams.dtype)

    def mhc_expand(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        if _has_operators(streams):
            return self._npu.mhc_post(streams, comb, y, post)
        spread = post.unsqueeze(-1) * y.float().unsqueeze(1)
        return (spread + torch.bmm(comb.transpose(1, 2), streams.float())).to(streams.dtype)

    def register(self, table: OpTable) -> None:
        """Add this family's implementations to `table`."""
        table.implements(
            mhc.mhc_mix,
            reason="npu_mhc_pre (its own collapse unused) + npu_mhc_sinkhorn for bf16 streams, "
            "M in 4, 6, 8; else torch",
            layout="streams bf16 [T, M, D], fn fp32 [(2 + M) M, M D], inner_precise 0 (fp32)",
        )(self.mhc_mix)
        table.implements(
            mhc.mhc_collapse,
            reason="torch: npu_mhc_pre computes its own pre",
            layout="fp32, one cast",
        )(self.mhc_collapse)
        table.implements(
            mhc.mhc_collapse_norm,
            reason="torch with the previous sublayer's pre, then npu_rms_norm on fp32",
            layout="fp32, cast before and after the norm",
        )(self.mhc_collapse_norm)
        table.implements(
            mhc.mhc_expand,
            reason="npu_mhc_post for bf16 streams, M in 4, 6, 8; else torch",
            layout="comb fp32 [T, source, destination], transposed by the operator",
        )(self.mhc_expand)
