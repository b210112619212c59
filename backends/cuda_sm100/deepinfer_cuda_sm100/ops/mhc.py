"""mHC family on Triton kernels; the boundary is composed of the three."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import mhc
from deepinfer.device.ops.mhc import MhcMix, MhcWeights
from deepinfer_kernels.mhc import mix_triton, streams_triton


def mhc_mix(
    streams: Tensor, weights: MhcWeights, *, norm_eps: float, hc_eps: float, num_iters: int
) -> MhcMix:
    return MhcMix(
        *mix_triton.mix(
            streams,
            weights.fn,
            weights.scale,
            weights.base,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            num_iters=num_iters,
        )
    )


def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return streams_triton.collapse(streams, pre)


def mhc_collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    return streams_triton.collapse_norm(streams, pre, weight, eps)


def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return streams_triton.expand(y, streams, post, comb)


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(mhc.mhc_mix, reason=reason)(mhc_mix)
    table.implements(mhc.mhc_collapse, reason=reason)(mhc_collapse)
    table.implements(mhc.mhc_collapse_norm, reason=reason)(mhc_collapse_norm)
    table.implements(mhc.mhc_expand, reason=reason)(mhc_expand)
