"""Parameters in their logical form: named tensors as the checkpoint stores them.

A backend turns them into its own packed form (`Backend.pack_*`); trainer, writer and conformance
work on this form directly.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.device import formats
from deepinfer.device.errors import ContractError


class WeightFormat(enum.Enum):
    """How one tensor is stored."""

    F32 = "f32"
    BF16 = "bf16"
    FP8_TILE32 = "fp8_tile32"
    """e4m3 [N, K], one ue8m0 scale per 32 x 32 tile."""
    MXFP4 = "mxfp4"
    """E2M1 packed [N, K / 2], one ue8m0 scale per 1 x 32."""
    FP8_ROW32 = "fp8_row32"
    """e4m3 [R, N], one ue8m0 scale per 1 x 32 (Engram tables)."""

    @property
    def is_quantized(self) -> bool:
        """True when activations that meet this weight are quantised too (normative mode)."""
        return self not in (WeightFormat.F32, WeightFormat.BF16)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One named parameter: data in its disk dtype, its scale bytes, its logical shape.

    Attributes:
        format: storage format.
        data: disk dtype; MXFP4 as uint8 or int8 of half the width.
        scale: uint8 (ue8m0 bytes) or None.
        shape: logical shape.
    """

    format: WeightFormat
    data: Tensor
    scale: Tensor | None
    shape: tuple[int, ...]

    def dequantize(self) -> Tensor:
        """fp32 tensor of the logical shape; never write into it, F32 data is not copied."""
        if self.format in (WeightFormat.F32, WeightFormat.BF16):
            return self.data.float()
        if self.scale is None:
            raise ContractError(
                f"StoredTensor of format {self.format.value} has no scale; "
                "quantised formats need their ue8m0 scale bytes"
            )
        if self.format is WeightFormat.FP8_TILE32:
            return formats.dequantize_tile32(self.data, self.scale)
        if self.format is WeightFormat.MXFP4:
            return formats.dequantize_q4_ue8m0(self.data, self.scale)
        return formats.dequantize_a8(self.data, self.scale)

    @property
    def num_bytes(self) -> int:
        """Bytes of data and scales as stored."""
        size = self.data.numel() * self.data.element_size()
        return size + (0 if self.scale is None else self.scale.numel())


Parameters = Mapping[str, StoredTensor]
"""Parameters by checkpoint name; a `.scale` lives inside the StoredTensor of its weight."""


def stored_from_float(value: Tensor, fmt: WeightFormat) -> StoredTensor:
    """Store a float tensor in `fmt`, quantising where the format asks for it.

    Args:
        value: logical tensor, any float dtype; 2-D for quantised formats.
        fmt: target format.
    """
    shape = tuple(value.shape)
    if fmt is WeightFormat.F32:
        return StoredTensor(fmt, value.float(), None, shape)
    if fmt is WeightFormat.BF16:
        return StoredTensor(fmt, value.to(torch.bfloat16), None, shape)
    if value.dim() != 2:
        raise ContractError(f"format {fmt.value} stores matrices, got shape {shape}")
    if fmt is WeightFormat.FP8_TILE32:
        data, scale = formats.quantize_tile32(value)
    elif fmt is WeightFormat.MXFP4:
        data, scale = formats.quantize_q4_ue8m0(value)
    else:
        data, scale = formats.quantize_row32(value)
    return StoredTensor(fmt, data, scale, shape)
