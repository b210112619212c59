"""Mixture of experts of one layer: gate, dispatch, experts, combine with the shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.ops.moe import Routing
from deepinfer.model.config import V41Config
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.packing import Packer


class MoE:
    """Routed experts and one shared expert; `physical` maps logical experts to slots' owners."""

    def __init__(
        self,
        config: V41Config,
        ops: ModelOps,
        weights: Packer,
        device: torch.device,
        *,
        num_experts: int,
        num_experts_per_tok: int,
    ) -> None:
        """Bind ops and pack weights; `weights` is at the layer's `ffn.`."""
        self._ops, self._config = ops, config
        self._num_experts_per_tok = num_experts_per_tok
        self._gate = weights.linear("gate.weight")
        self._bias = weights.vector("gate.bias")
        self._experts = weights.experts(range(num_experts))
        self._shared_in = weights.linear("shared_experts.w1.weight", "shared_experts.w3.weight")
        self._shared_out = weights.linear("shared_experts.w2.weight")
        self._physical = torch.arange(num_experts, device=device)

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Routing]:
        """Output of rows x [T, D] and where they were routed.

        Args:
            x: [T, D] normed input of the sublayer.
            valid: [T] bool; padding rows go to no expert.
        """
        ops, config = self._ops, self._config
        routing = ops.moe_gate(
            x,
            self._gate,
            self._bias,
            num_experts_per_tok=self._num_experts_per_tok,
            route_scale=config.routed_scaling_factor,
        )
        batch = ops.moe_dispatch(x, routing, self._physical, valid)
        hidden = ops.swiglu(ops.linear(x, self._shared_in), config.swiglu_limit)
        shared = ops.linear(hidden, self._shared_out)
        outputs = ops.moe_experts(batch, self._experts, config.swiglu_limit)
        return ops.moe_combine(outputs, batch, shared), routing
