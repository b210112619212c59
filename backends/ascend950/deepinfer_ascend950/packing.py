"""From stored parameters to the layouts of the MX operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.device import formats
from deepinfer.device.errors import ConfigError
from deepinfer.device.weights import StoredTensor, WeightFormat
from deepinfer_ascend950.handles import ExpertMatrices, FloatLinear, MxLinear

# "The last two dimensions of weight are aligned to 32 bytes": 64 values of E2M1 along K.
_ALIGNED = 64


def paired_scales(scales: Tensor) -> Tensor:
    """Scale bytes [..., G] as [..., ceil(G / 2), 2], as npu_dynamic_mx_quant lays them out."""
    padded = pad(scales, (0, scales.shape[-1] % 2))
    return torch.stack((padded[..., 0::2], padded[..., 1::2]), dim=-1)


def _row_scales(part: StoredTensor) -> Tensor:
    """uint8 scale of each row and 32 columns [N, ceil(K / 32)]; tiles are repeated for rows."""
    assert part.scale is not None
    if part.format is WeightFormat.FP8_TILE32:
        return part.scale.repeat_interleave(formats.GROUP, 0)[: part.shape[0]]
    return part.scale


def _e4m3_codes(part: StoredTensor) -> Tensor:
    """float8_e4m3fn codes [N, K]; every E2M1 value is also an e4m3 value."""
    if part.format is WeightFormat.MXFP4:
        return formats.unpack_e2m1(part.data).to(torch.float8_e4m3fn)
    return part.data


def pack_mx_linear(parts: Sequence[StoredTensor], device: torch.device) -> MxLinear:
    """Quantised matrices [N_i, K] side by side."""
    codes = torch.cat([_e4m3_codes(part).view(torch.uint8) for part in parts])
    scales = torch.cat([_row_scales(part) for part in parts])
    return MxLinear(
        codes.to(device).view(torch.float8_e4m3fn), paired_scales(scales).contiguous().to(device)
    )


def pack_float_linear(
    parts: Sequence[StoredTensor], *, exact: bool, device: torch.device
) -> FloatLinear:
    """Matrices [N_i, K] side by side, in fp32 if any of them or the numerics is."""
    all_bf16 = all(part.format is WeightFormat.BF16 for part in parts)
    matrix = torch.cat([part.dequantize() for part in parts]).to(device)
    if exact or not all_bf16:
        return FloatLinear(matrix, matrix)
    return FloatLinear(matrix.to(torch.bfloat16), matrix)


def pack_expert_matrices(
    matrices: Sequence[Sequence[StoredTensor]], *, exact: bool, device: torch.device
) -> ExpertMatrices:
    """One matrix for each expert from parts stacked along the output.

    Args:
        matrices: for each expert, its parts [N_i, K] of one format.
        exact: dequantise to fp32.
        device: where they go.
    Raises:
        ConfigError: the experts are stored in several formats.
    """
    stored = {part.format for parts in matrices for part in parts}
    if len(stored) != 1:
        raise ConfigError(
            f"pack_experts was given matrices of formats {sorted(f.value for f in stored)}; the "
            "grouped product takes one format for all experts: store them alike"
        )
    (fmt,) = stored
    num_outputs = sum(part.shape[0] for part in matrices[0])
    if exact or not fmt.is_quantized:
        dtype = torch.bfloat16 if fmt is WeightFormat.BF16 and not exact else torch.float32
        dense = [torch.cat([part.dequantize() for part in parts]) for parts in matrices]
        return ExpertMatrices(torch.stack(dense).to(dtype).to(device), None, num_outputs)
    per_byte = 2 if fmt is WeightFormat.MXFP4 else 1
    data = torch.stack(
        [torch.cat([part.data.view(torch.uint8) for part in parts]) for parts in matrices]
    )
    scales = torch.stack([torch.cat([_row_scales(part) for part in parts]) for parts in matrices])
    inner = data.shape[2] * per_byte
    missing_inner, missing_outputs = -inner % _ALIGNED, -num_outputs % _ALIGNED
    data = pad(data, (0, missing_inner // per_byte, 0, missing_outputs)).contiguous().to(device)
    scales = pad(scales, (0, missing_inner // formats.GROUP, 0, missing_outputs))
    if fmt is not WeightFormat.MXFP4:
        data = data.view(torch.float8_e4m3fn)
    return ExpertMatrices(data, paired_scales(scales).contiguous().to(device), num_outputs)


def aligned_inner(x: Tensor) -> Tensor:
    """x [S, K] with zero columns up to the alignment of packed experts."""
    missing = -x.shape[1] % _ALIGNED
    return pad(x, (0, missing)) if missing else x
