"""Parameters as one forward sees them: rounded to their storage format or not, in one dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from deepinfer.device.weights import WeightFormat
from deepinfer_training import fake_quant
from deepinfer_training.fake_quant import Numerics
from deepinfer_training.parameters import storage_format


class Weights:
    """Reads parameters by checkpoint name; made anew for every forward."""

    def __init__(self, parameters: Mapping[str, Tensor], numerics: Numerics) -> None:
        self.numerics = numerics
        self._parameters = parameters

    def fp32(self, name: str) -> Tensor:
        """The parameter in fp32, through its storage format where weights are quantised."""
        value = self._parameters[name]
        if not self.numerics.quantize_weights:
            return value
        return fake_quant.round_weight(value, storage_format(name))

    def matrix(self, name: str) -> Tensor:
        """The parameter in the activation dtype."""
        return self.fp32(name).to(self.numerics.dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x @ matrix^T in the activation dtype; the input is rounded where the engine rounds it."""
        x = x.to(self.numerics.dtype)
        return linear(self.round_input(x, name), self.matrix(name))

    def linear_fp32(self, x: Tensor, name: str) -> Tensor:
        """x @ matrix^T in fp32, nothing rounded."""
        return linear(x.float(), self.fp32(name))

    def round_input(self, x: Tensor, name: str) -> Tensor:
        """x as a product with this weight takes it."""
        if self.numerics.quantize_activations and storage_format(name).is_quantized:
            return fake_quant.round_linear_input(x)
        return x

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """Rows of an embedding or Engram table in the activation dtype: [*ids.shape, N]."""
        table = self._parameters[name]
        # Not torch's embedding: its backward may wait for the device, which a capture forbids.
        rows = table.index_select(0, ids.flatten()).view(*ids.shape, table.shape[1])
        if self.numerics.quantize_weights:
            fmt = storage_format(name)
            if fmt is WeightFormat.FP8_ROW32:
                # Scales belong to rows, so only what is looked up needs rounding.
                rows = fake_quant.round_weight(rows, fmt)
        return rows.to(self.numerics.dtype)

    def rmsnorm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMSNorm over the last dimension, computed in fp32, in the activation dtype."""
        values = x.float()
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        return (self.fp32(name) * (values * scale)).to(self.numerics.dtype)


@torch.no_grad()
def rounded_parameters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters after a trip through their storage formats, fp32, without gradients."""
    return {
        name: fake_quant.round_weight(value.detach(), storage_format(name)).detach()
        for name, value in parameters.items()
    }
