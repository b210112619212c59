"""Elementwise pieces of the forward that a compiler may fuse; eager until `compile_all`.

Every function here takes and returns tensors only and holds no state, so that the compiled and
the plain form can be exchanged and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from deepinfer.device import formats


def _swiglu(gate_up: Tensor, weight: Tensor, limit: float) -> Tensor:
    gate = gate_up[:, 0].float().clamp(max=limit)
    up = gate_up[:, 1].float().clamp(-limit, limit)
    return (silu(gate) * up * weight.unsqueeze(-1)).to(gate_up.dtype)


def _index_scores(dots: Tensor, head_weights: Tensor) -> Tensor:
    return (dots.relu() * head_weights.unsqueeze(-1)).sum(2, dtype=torch.float32)


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype)


def _expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    spread = post.unsqueeze(-1) * y.float().unsqueeze(1)
    return torch.baddbmm(spread, comb.transpose(1, 2), streams.float()).to(streams.dtype)


def _expand_unrolled(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    # A fusing compiler turns the sum into one pass; a batched 4 x 4 product would stay a call.
    values = streams.float()
    mixed = post.unsqueeze(-1) * y.float().unsqueeze(1)
    for stream in range(streams.shape[1]):
        mixed = mixed + comb[:, stream].unsqueeze(-1) * values[:, stream : stream + 1]
    return mixed.to(streams.dtype)


def _stream_statistic(streams: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    flat = streams.flatten(1).float()
    return flat, torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    tail = x[..., -2 * half :].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., : -2 * half], turned.to(x.dtype)), dim=-1)


swiglu: Callable[[Tensor, Tensor, float], Tensor] = _swiglu
index_scores: Callable[[Tensor, Tensor], Tensor] = _index_scores
collapse: Callable[[Tensor, Tensor], Tensor] = _collapse
expand: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _expand
stream_statistic: Callable[[Tensor, float], tuple[Tensor, Tensor]] = _stream_statistic
rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = _rotate
round_a8: Callable[[Tensor], Tensor] = formats.round_trip_a8

_EAGER: dict[str, Callable[..., Any]] = {
    "swiglu": _swiglu,
    "index_scores": _index_scores,
    "collapse": _collapse,
    "expand": _expand,
    "stream_statistic": _stream_statistic,
    "rotate": _rotate,
    "round_a8": formats.round_trip_a8,
}


def compile_all() -> None:
    """Replace every function by its compiled form; compilation happens at its first call."""
    # One form for each rank, type and layout it is called with; above the limit it stays eager.
    torch._dynamo.config.recompile_limit = 32
    for name, function in _EAGER.items():
        source = _expand_unrolled if name == "expand" else function
        globals()[name] = torch.compile(source, dynamic=True)


def use_eager() -> None:
    """Go back to the plain functions."""
    globals().update(_EAGER)
