"""Norm family: RMSNorm."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.comparison import Ulp
from deepinfer.device.op import op


@op(family="norm", compare=Ulp())
def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, weighted.

    Args:
        x: [..., N] activation dtype.
        weight: [N] fp32.
        eps: added to the mean square.

    Returns:
        [..., N] in x's dtype: weight * (x * rsqrt(mean(x^2) + eps)) in fp32, cast once.

    Contract: rows are independent; zero rows allowed; an all-zero row stays zero.
    Source: RMSNorm of the V4.1 backbone.
    """
    raise NotImplementedError
