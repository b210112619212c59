"""mHC: the residual streams' mixing, collapse and expansion."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from deepinfer_training import fused, sinkhorn
from deepinfer_training.architecture import Architecture
from deepinfer_training.weights import Weights


class Mix(NamedTuple):
    """Coefficients of one sublayer; pre serves the NEXT sublayer's collapse.

    Attributes:
        pre: [N, m] fp32.
        post: [N, m] fp32.
        comb: [N, m, m] fp32; first index source, second destination stream.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


def mix(streams: Tensor, weights: Weights, name: str, arch: Architecture) -> Mix:
    """Coefficients of sublayer `name` (for example `layers.0.hc_attn`) for streams [N, m, D]."""
    m = arch.hc_mult
    flat, statistic = fused.stream_statistic(streams, arch.rms_norm_eps)
    raw = linear(flat, weights.fp32(f"{name}_fn")) * statistic
    scale, base = weights.fp32(f"{name}_scale"), weights.fp32(f"{name}_base")
    pre = torch.sigmoid(raw[:, :m] * scale[0] + base[:m]) + arch.hc_eps
    post = 2.0 * torch.sigmoid(raw[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = (raw[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m)
    comb = torch.softmax(logits, dim=-1) + arch.hc_eps
    return Mix(pre, post, sinkhorn.normalise(comb, arch.hc_eps, arch.hc_sinkhorn_iters))


def first_pre(num_rows: int, arch: Architecture, device: torch.device) -> Tensor:
    """[N, m] fp32: the first sublayer reads stream 0."""
    pre = torch.zeros((num_rows, arch.hc_mult), device=device)
    pre[:, 0] = 1.0
    return pre


def collapse_norm(
    streams: Tensor, pre: Tensor, weights: Weights, name: str, arch: Architecture
) -> Tensor:
    """[N, D] input of a sublayer in the activation dtype."""
    return weights.rmsnorm(fused.collapse(streams, pre), name, arch.rms_norm_eps)


def expand(y: Tensor, streams: Tensor, mixed: Mix) -> Tensor:
    """Streams [N, m, D] after a sublayer that returned y [N, D]."""
    return fused.expand(y, streams, mixed.post, mixed.comb)
