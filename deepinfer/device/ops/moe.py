"""MoE family: gate, dispatch to expert slots, experts, combine.

The way is dispatch -> expert slots -> combine on one rank as on many, and goes through a
logical-to-physical expert map, so that spare copies and expert parallelism change no caller.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepinfer.device.comparison import Close, Exact, Product, SelectionSet, Ulp
from deepinfer.device.handles import ExpertBatch, ExpertWeights, LinearWeight
from deepinfer.device.op import op


class Routing(NamedTuple):
    """Experts of every row.

    Attributes:
        ids: [T, k] int64 logical experts, best biased score first.
        weights: [T, k] fp32 final weights: normalised and scaled.
    """

    ids: Tensor
    weights: Tensor


@op(
    family="moe",
    compare={
        "ids": SelectionSet(rtol=1e-6, origin="biased fp32 scores closer than fp32 sum order"),
        "weights": Close(),
    },
)
def moe_gate(
    x: Tensor, weight: LinearWeight, bias: Tensor, *, num_experts_per_tok: int, route_scale: float
) -> Routing:
    """Choose experts: score = sqrt(softplus(x @ W^T)), the bias selects and never weighs.

    Args:
        x: [T, D] activation dtype, promoted to fp32.
        weight: packed [E, D].
        bias: [E] fp32 selection bias.
        num_experts_per_tok: k.
        route_scale: factor of the normalised weights.

    Returns:
        Routing; equal biased scores take the lowest expert; softplus(z) = z above 20; weights
        are score / (sum + 1e-20) * route_scale.
    """
    raise NotImplementedError


@op(family="moe", compare=Exact())
def moe_dispatch(x: Tensor, routing: Routing, physical: Tensor, valid: Tensor) -> ExpertBatch:
    """Send rows to the slots of their experts.

    Args:
        x: [T, D] activation dtype.
        routing: logical experts and weights.
        physical: [E] int64 physical expert of each logical one.
        valid: [T] bool; other rows are sent nowhere and come back as zeros.

    Returns:
        The batch of expert slots; with ranks, after the exchange.
    """
    raise NotImplementedError


@op(family="moe", compare=Product())
def moe_experts(batch: ExpertBatch, weights: ExpertWeights, swiglu_limit: float) -> Tensor:
    """Run every slot through its expert; the routing weight multiplies before the down matrix.

    Args:
        batch: from `moe_dispatch`.
        weights: packed experts in physical order.
        swiglu_limit: gate is cut above, up on both sides.

    Returns:
        [slots, D] activation dtype.
    """
    raise NotImplementedError


@op(family="moe", compare=Ulp())
def moe_combine(outputs: Tensor, batch: ExpertBatch, shared: Tensor) -> Tensor:
    """Bring slot outputs back to their rows and add the shared expert.

    Args:
        outputs: [slots, D] activation dtype.
        batch: from `moe_dispatch`.
        shared: [T, D] activation dtype, output of the shared expert.

    Returns:
        [T, D] activation dtype: fp32 sum in ascending logical expert id, plus shared in fp32,
        one cast.
    """
    raise NotImplementedError


@op(family="moe", compare=Ulp())
def swiglu(gate_up: Tensor, swiglu_limit: float) -> Tensor:
    """Clamped SwiGLU of a shared expert: silu(min(g, limit)) * clamp(u, -limit, limit).

    Args:
        gate_up: [T, 2 I] activation dtype, gate then up.
        swiglu_limit: clamp.

    Returns:
        [T, I] activation dtype, fp32 arithmetic, one cast; clamping keeps NaN.
    """
    raise NotImplementedError
