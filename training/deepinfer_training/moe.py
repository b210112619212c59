"""MoE of whole batches: all experts in one product, the gate zeroes what was not routed.

Eight times the arithmetic of a routed product, but three calls; at this model's size that is
faster and keeps shapes fixed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, softplus

from deepinfer_training import fake_quant, fused
from deepinfer_training.architecture import Architecture
from deepinfer_training.weights import Weights

_RENORM_EPS = 1e-20


class Routed(NamedTuple):
    """Output of a MoE and its routing.

    Attributes:
        y: [N, D].
        chosen: [N, E] fp32, 1 where an expert was routed to.
        score: [N, E] fp32 router scores.
    """

    y: Tensor
    chosen: Tensor
    score: Tensor


def moe(
    x: Tensor, weights: Weights, prefix: str, arch: Architecture, *, experts_per_tok: int
) -> Routed:
    """Routed experts and the shared one for x [N, D]; `prefix` ends in `ffn.`."""
    score = softplus(weights.linear_fp32(x, f"{prefix}gate.weight"), threshold=20.0).sqrt()
    biased = score.detach() + weights.fp32(f"{prefix}gate.bias")
    if weights.numerics.precise:
        ids = torch.sort(biased, dim=1, descending=True, stable=True).indices[:, :experts_per_tok]
    else:
        ids = biased.topk(experts_per_tok, dim=1).indices
    chosen = torch.zeros_like(score).scatter_(1, ids, 1.0)
    part = score * chosen
    part = part / (part.sum(1, keepdim=True) + _RENORM_EPS) * arch.routed_scaling_factor
    part = torch.cat((part, torch.ones_like(part[:, :1])), dim=1)  # the shared expert

    first, second = _stacked(weights, prefix, "w1"), _stacked(weights, prefix, "w3")
    out = _stacked(weights, prefix, "w2")
    num, inner, hidden = first.shape
    numerics = weights.numerics
    x = x.to(numerics.dtype)
    if numerics.quantize_activations:
        x = fake_quant.round_linear_input(x)
    gate_up = linear(x, torch.cat((first, second)).view(2 * num * inner, hidden))
    activated = fused.swiglu(gate_up.view(-1, 2, num, inner), part, arch.swiglu_limit)
    if numerics.quantize_activations:
        activated = fake_quant.round_linear_input(activated)
    if numerics.precise:
        # The engine rounds every expert's output before it adds them up in fp32.
        each = torch.einsum("nei,edi->ned", activated, out)
        y = each.float().sum(1).to(numerics.dtype)
    else:
        y = linear(activated.flatten(1), out.transpose(0, 1).reshape(hidden, num * inner))
    return Routed(y, chosen, score)


def _stacked(weights: Weights, prefix: str, part: str) -> Tensor:
    """[E + 1, ...] routed experts, then the shared one."""
    routed = weights.matrix(f"{prefix}experts.{part}")
    shared = weights.matrix(f"{prefix}shared_experts.{part}.weight")
    return torch.cat((routed, shared.unsqueeze(0)))


def balance_loss(routed: Routed, num_seqs: int, experts_per_tok: int) -> Tensor:
    """Sequence-wise balance loss: load share times score share, 1 when both are uniform."""
    num_experts = routed.chosen.shape[1]
    load = routed.chosen.view(num_seqs, -1, num_experts).mean(1) * (num_experts / experts_per_tok)
    share = routed.score / routed.score.sum(-1, keepdim=True)
    return (load * share.view(num_seqs, -1, num_experts).mean(1)).sum(-1).mean()
