"""From stored parameters to operands of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.device.errors import ConfigError
from deepinfer.device.formats import GROUP
from deepinfer.device.numerics import Numerics
from deepinfer.device.weights import StoredTensor, WeightFormat
from deepinfer_kernels.quant.gemm_triton import Operand


def plain_operand(values: Sequence[Tensor], device: torch.device) -> Operand:
    """Float matrices [N_i, K] below each other, in their own dtype, on the device."""
    return Operand("plain", torch.cat(list(values)).to(device).contiguous(), None)


def _row_scales(part: StoredTensor) -> Tensor:
    """ue8m0 scales [N, K / 32] of one matrix: a tile's scale is repeated for its 32 rows.

    That is the layout of block-scaled tensor-core instructions, and parts whose heights are no
    multiples of 32 can lie below each other.
    """
    assert part.scale is not None
    if part.format is WeightFormat.FP8_TILE32:
        return part.scale.repeat_interleave(GROUP, 0)[: part.shape[0]]
    return part.scale


def matrix_operand(
    parts: Sequence[StoredTensor], numerics: Numerics, device: torch.device
) -> Operand:
    """Matrices that share their input, below each other.

    Exact numerics keep fp32 values; normative numerics keep the stored codes and scales.

    Raises:
        ConfigError: the parts have different formats, or one that no product takes.
    """
    stored = sorted({part.format.value for part in parts})
    if len(stored) != 1:
        raise ConfigError(
            f"matrices that share an input are stored in the formats {', '.join(stored)}; store "
            "them alike"
        )
    fmt = parts[0].format
    if numerics is Numerics.EXACT or fmt is WeightFormat.F32:
        return plain_operand([part.dequantize() for part in parts], device)
    if fmt is WeightFormat.BF16:
        return plain_operand([part.data for part in parts], device)
    if parts[0].shape[1] % GROUP:
        raise ConfigError(
            f"a {fmt.value} matrix of shape {parts[0].shape} meets an input quantised in groups "
            f"of {GROUP}; its width must be a multiple of {GROUP}"
        )
    name = "mxfp4" if fmt is WeightFormat.MXFP4 else "mxfp8"
    codes = torch.cat([part.data.view(torch.uint8) for part in parts])
    scales = torch.cat([_row_scales(part) for part in parts])
    return Operand(name, codes.to(device).contiguous(), scales.to(device).contiguous())


def stacked_operand(
    experts: Sequence[Sequence[StoredTensor]], numerics: Numerics, device: torch.device
) -> Operand:
    """One matrix per expert, [E, N, K]; each expert gives the parts of its matrix.

    Packed expert by expert, so that the host never holds a second copy of all of them.
    """
    stack: Operand | None = None
    for index, parts in enumerate(experts):
        one = matrix_operand(parts, numerics, device)
        if stack is None:
            stack = Operand(
                one.format,
                one.data.new_empty((len(experts), *one.data.shape)),
                None
                if one.scales is None
                else one.scales.new_empty((len(experts), *one.scales.shape)),
            )
        stack.data[index] = one.data
        if stack.scales is not None and one.scales is not None:
            stack.scales[index] = one.scales
    if stack is None:
        raise ConfigError("pack_experts was given no experts; a rank holds at least one")
    return stack
