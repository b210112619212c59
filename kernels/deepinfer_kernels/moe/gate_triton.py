"""Choosing experts from router logits: sqrt(softplus), a bias that selects, normalised weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase


@triton.jit
def softplus(x):
    """log(1 + exp(x)) without overflow or cancellation; x itself above 20."""
    small = tl.exp(-tl.abs(x))
    # log1p by its series below 1/16, where 1 + small would lose the digits of small.
    series = small * (
        1.0 - small * (0.5 - small * (1.0 / 3.0 - small * (0.25 - small * (0.2 - small / 6.0))))
    )
    log1p = tl.where(small < 0.0625, series, tl.log(1.0 + small))
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0) + log1p)


@triton.jit
def _choose(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, num_experts, k, route_scale, BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < num_experts
    logits = tl.load(logits_ptr + row * num_experts + expert, mask=inside, other=0.0)
    score = tl.sqrt_rn(softplus(logits))
    biased = score + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    left = tl.where(inside, biased, float("-inf"))
    rank = tl.arange(0, K_BLOCK)
    ids = tl.zeros([K_BLOCK], dtype=tl.int32)
    weights = tl.zeros([K_BLOCK], dtype=tl.float32)
    for place in range(k):
        best = tl.argmax(left, axis=0, tie_break_left=True)
        own = tl.sum(tl.where(expert == best, score, 0.0), axis=0)
        ids = tl.where(rank == place, best, ids)
        weights = tl.where(rank == place, own, weights)
        left = tl.where(expert == best, float("-inf"), left)
    weights = weights / (tl.sum(weights, axis=0) + 1e-20) * route_scale
    tl.store(ids_ptr + row * k + rank, ids.to(tl.int64), mask=rank < k)
    tl.store(weights_ptr + row * k + rank, weights, mask=rank < k)


def choose_experts(
    logits: Tensor, bias: Tensor, *, k: int, route_scale: float
) -> tuple[Tensor, Tensor]:
    """The k experts of each row with the best biased score, best first, lowest id among equals.

    Args:
        logits: [T, E] fp32 router logits.
        bias: [E] fp32.
        k: experts per row, at most E.
        route_scale: factor of the normalised weights.

    Returns:
        ids [T, k] int64 and weights [T, k] fp32.
    """
    num_rows, num_experts = logits.shape
    ids = torch.empty((num_rows, k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_rows, k), dtype=torch.float32, device=logits.device)
    if num_rows:
        _choose[(num_rows,)](
            logits.contiguous(), bias, ids, weights, num_experts, k, route_scale,
            BLOCK=triton.next_power_of_2(num_experts), K_BLOCK=triton.next_power_of_2(k),
        )  # fmt: skip
    return ids, weights


def choose_experts_truth(
    logits: Tensor, bias: Tensor, *, k: int, route_scale: float
) -> tuple[Tensor, Tensor]:
    """`choose_experts` in plain torch, float64."""
    score = torch.nn.functional.softplus(logits.double()).sqrt()
    ids = torch.sort(score + bias.double(), dim=1, descending=True, stable=True).indices[:, :k]
    weights = score.gather(1, ids)
    return ids, (weights / (weights.sum(1, keepdim=True) + 1e-20) * route_scale).float()


COMPILE_CASES = (
    CompileCase(
        "_choose",
        {
            "logits_ptr": "*fp32", "bias_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32",
            "num_experts": "i32", "k": "i32", "route_scale": "fp32",
        },
        {"BLOCK": 512, "K_BLOCK": 8},
    ),
)  # fmt: skip
