"""Rounding as the engine rounds, with straight-through gradients.

The forward values are those of `deepinfer.device.formats`; a gradient passes as if nothing had
been rounded, which is right because no scale lets a value saturate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.device import formats
from deepinfer.device.weights import WeightFormat
from deepinfer_training import fused

RoundTrip = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Numerics:
    """What is rounded in a forward.

    Attributes:
        dtype: of activations and matrix operands.
        quantize_weights: weights pass through their storage format.
        quantize_activations: linear inputs and cache rows are rounded as in normative numerics.
        precise: scores, logits and index ties are computed as the engine does; slower.
    """

    dtype: torch.dtype
    quantize_weights: bool = False
    quantize_activations: bool = False
    precise: bool = False


TRAINING = Numerics(torch.bfloat16)
ANNEALING = Numerics(torch.bfloat16, quantize_weights=True, quantize_activations=True)
NORMATIVE = Numerics(torch.bfloat16, quantize_weights=True, quantize_activations=True, precise=True)
EXACT = Numerics(torch.float32, quantize_weights=True, precise=True)
FULL_PRECISION = Numerics(torch.float32, precise=True)


def on_device(numerics: Numerics, device: torch.device) -> Numerics:
    """Numerics of a training step; a CPU has no fast bf16 products and computes in fp32."""
    return replace(numerics, dtype=torch.float32) if device.type == "cpu" else numerics


class _StraightThrough(torch.autograd.Function):
    """rounding(x) forwards, identity backwards."""

    @staticmethod
    def forward(ctx: object, x: Tensor, rounding: RoundTrip) -> Tensor:
        return rounding(x.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def rounded(x: Tensor, rounding: RoundTrip) -> Tensor:
    """x with its values rounded; gradients pass straight through."""
    result: Tensor = _StraightThrough.apply(x, rounding)  # type: ignore[no-untyped-call]
    return result


def round_linear_input(x: Tensor) -> Tensor:
    """x [..., N] as a W8A8 or W4A8 product sees it."""
    return rounded(x, fused.round_a8)


def round_window_row(x: Tensor) -> Tensor:
    """Window KV rows as the cache gives them back."""
    return rounded(x, fused.round_a8)


def round_compressed_row(x: Tensor) -> Tensor:
    """Compressed KV rows as the cache gives them back."""
    return rounded(x, formats.round_trip_q4_e4m3)


def round_index_row(x: Tensor) -> Tensor:
    """Index keys and index queries as they meet in a score."""
    return rounded(x, formats.round_trip_q4_ue8m0)


def _tile32(weight: Tensor) -> Tensor:
    return formats.dequantize_tile32(*formats.quantize_tile32(weight))


def _row32(table: Tensor) -> Tensor:
    return formats.dequantize_a8(*formats.quantize_row32(table))


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


_WEIGHT_ROUNDINGS: dict[WeightFormat, RoundTrip] = {
    WeightFormat.BF16: _bf16,
    WeightFormat.FP8_TILE32: _tile32,
    WeightFormat.FP8_ROW32: _row32,
    WeightFormat.MXFP4: formats.round_trip_q4_ue8m0,
}


def round_weight(weight: Tensor, fmt: WeightFormat) -> Tensor:
    """fp32 weight as it comes back from a checkpoint in format `fmt`."""
    return weight if fmt is WeightFormat.F32 else rounded(weight, _WEIGHT_ROUNDINGS[fmt])
