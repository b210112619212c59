"""mHC family: manifold-constrained hyper-connections around every sublayer.

A sublayer is collapsed with the `pre` of the sublayer before it; its own `post` and `comb` are
used when its output is spread over the streams again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from deepinfer.device.comparison import PROJECTION, Ulp
from deepinfer.device.op import OpTable, op


class MhcWeights(NamedTuple):
    """Parameters of one sublayer's mixing.

    Attributes:
        fn: [(2 + M) * M, M * D] fp32; rows: pre, post, comb (row-major M x M).
        scale: [3] fp32 for pre, post, comb.
        base: [(2 + M) * M] fp32.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor


class MhcMix(NamedTuple):
    """Mixing coefficients of one sublayer.

    Attributes:
        pre: [T, M] fp32, collapses the streams for the NEXT sublayer.
        post: [T, M] fp32, weight of the sublayer's output in each stream.
        comb: [T, M, M] fp32, first index source stream, second destination stream.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


@op(
    family="mhc",
    compare={"pre": PROJECTION, "post": PROJECTION, "comb": PROJECTION},
)
def mhc_mix(
    streams: Tensor, weights: MhcWeights, *, norm_eps: float, hc_eps: float, num_iters: int
) -> MhcMix:
    """Mixing coefficients from the residual streams.

    Args:
        streams: [T, M, D] activation dtype; flattened stream-major for the projection.
        weights: parameters of the sublayer.
        norm_eps: eps of the one mean-square statistic over all M * D values of a row.
        hc_eps: added after sigmoid and softmax and inside every Sinkhorn denominator.
        num_iters: softmax and one column step, then num_iters - 1 times (row, column).

    Returns:
        pre = sigmoid + hc_eps, post = 2 * sigmoid (no eps), comb after Sinkhorn; all fp32.
    """
    raise NotImplementedError


@op(family="mhc", compare=Ulp())
def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams of each row.

    Args:
        streams: [T, M, D] activation dtype.
        pre: [T, M] fp32; 1 / M everywhere gives the mean that a draft tap is.

    Returns:
        [T, D] activation dtype, fp32 arithmetic, one cast.

    Contract: rows are independent; zero rows allowed.
    Source: draft taps and the head input of DSpark.
    """
    raise NotImplementedError


@op(family="mhc", compare=Ulp())
def mhc_collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Collapse the streams with `pre` and normalise.

    Args:
        streams: [T, M, D] activation dtype.
        pre: [T, M] fp32, of the previous sublayer (one-hot on stream 0 at the start).
        weight: [D] fp32 norm weight.
        eps: eps of the norm.

    Returns:
        [T, D] activation dtype: the weighted sum is cast to the activation dtype BEFORE the
        norm, and the norm casts once more.
    """
    raise NotImplementedError


@op(family="mhc", compare=Ulp())
def mhc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Spread a sublayer's output over the streams: post[j] * y + sum_i comb[i, j] * streams[i].

    Args:
        y: [T, D] activation dtype.
        streams: [T, M, D] activation dtype.
        post: [T, M] fp32.
        comb: [T, M, M] fp32, [source, destination].

    Returns:
        [T, M, D] activation dtype, one cast.
    """
    raise NotImplementedError


class MhcBoundary(NamedTuple):
    """What stands between two sublayers: new streams, next mixing, next input."""

    streams: Tensor
    mix: MhcMix
    x: Tensor


def _compose_boundary(ops: OpTable) -> Callable[..., MhcBoundary]:
    expand, mix_of, collapse = ops[mhc_expand], ops[mhc_mix], ops[mhc_collapse_norm]

    def boundary(
        y: Tensor,
        streams: Tensor,
        mix: MhcMix,
        weights: MhcWeights,
        norm_weight: Tensor,
        *,
        norm_eps: float,
        hc_eps: float,
        num_iters: int,
    ) -> MhcBoundary:
        after = expand(y, streams, mix.post, mix.comb)
        following = mix_of(after, weights, norm_eps=norm_eps, hc_eps=hc_eps, num_iters=num_iters)
        return MhcBoundary(after, following, collapse(after, mix.pre, norm_weight, norm_eps))

    return boundary


@op(
    family="mhc",
    compare={
        "streams": Ulp(),
        "pre": PROJECTION,
        "post": PROJECTION,
        "comb": PROJECTION,
        "x": Ulp(),
    },
    compose=_compose_boundary,
)
def mhc_boundary(
    y: Tensor,
    streams: Tensor,
    mix: MhcMix,
    weights: MhcWeights,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> MhcBoundary:
    """From one sublayer's output to the next sublayer's input in one op.

    Args:
        y: [T, D] activation dtype, output of the sublayer that ends.
        streams: [T, M, D] activation dtype, streams it started from.
        mix: its own mixing; post and comb expand, pre collapses for the next sublayer.
        weights: mixing parameters of the next sublayer.
        norm_weight: [D] fp32 norm of the next sublayer.
        norm_eps: eps of norm and statistic.
        hc_eps: eps of the mixing.
        num_iters: Sinkhorn iterations.

    Returns:
        streams after the expansion, mixing of the next sublayer, its collapsed, normed input.

    Contract: equals mhc_expand, mhc_mix, mhc_collapse_norm(pre = mix.pre) in this order.
    """
    raise NotImplementedError
