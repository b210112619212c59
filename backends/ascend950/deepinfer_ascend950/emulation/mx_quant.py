"""npu_dynamic_mx_quant.

Pages: torch_npu 2.13 operator docs, npu_dynamic_mx_quant; CANN ops-nn, aclnnDynamicMxQuantV3
(formulas of the three scale algorithms, padding of the scales with zero).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_ascend950.emulation.documented import OperatorPage
from deepinfer_ascend950.emulation.mx_format import E8M0_BIAS, packed_e2m1, paired_scales

_PAGE = OperatorPage("npu_dynamic_mx_quant")
_E4M3, _E2M1 = (24, 292), (296,)
_E4M3_MAX, _E4M3_EMAX, _E2M1_EMAX = 448.0, 8, 2
_INPUTS = (torch.float16, torch.bfloat16, torch.float32)
_BLOCK = 32


def npu_dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantise along an axis: one power-of-two scale for each block of values."""
    _PAGE.rank("input", input, range(1, 8))
    _PAGE.dtype("input", input, _INPUTS)
    _PAGE.value("round_mode", round_mode, ("rint", "floor", "round"))
    _PAGE.value("scale_alg", scale_alg, (0, 1, 2))
    _PAGE.require(
        block_size % 32 == 0 and 0 < block_size <= 1024,
        f"block_size is {block_size}, documented are multiples of 32 up to 1024",
    )
    _PAGE.require(
        max_low_bound == 0.0 or (scale_alg == 1 and max_low_bound > 0.0),
        f"max_low_bound is {max_low_bound}, documented for scale_alg 1 only, from 0 up",
    )
    if dst_type not in (*_E4M3, *_E2M1):
        raise _PAGE.not_emulated(f"dst_type {dst_type}")
    is_fp8 = dst_type in _E4M3
    _PAGE.value("scale_alg of this dst_type", scale_alg, (0, 1) if is_fp8 else (0, 2))
    _PAGE.require(
        dst_type_max == 0.0 or (not is_fp8 and 6.0 <= dst_type_max <= 12.0),
        f"dst_type_max is {dst_type_max}, documented are 0 and, for E2M1, 6 to 12",
    )
    if axis not in (-1, input.dim() - 1) or block_size != _BLOCK or round_mode != "rint":
        raise _PAGE.not_emulated(f"axis {axis}, block_size {block_size}, round_mode {round_mode}")
    size = input.shape[-1]
    if input.dtype is torch.float32:
        _PAGE.require(size >= 32, f"fp32 input needs at least 32 values on the axis, has {size}")
    if not is_fp8:
        _PAGE.require(size % 2 == 0, f"E2M1 needs an even last dimension, has {size}")
    padded = torch.nn.functional.pad(input.float(), (0, -size % _BLOCK))
    blocks: Tensor = padded.unflatten(-1, (-1, _BLOCK))
    amax = blocks.abs().amax(-1)
    if is_fp8:
        exponent = _cublas(amax, max_low_bound) if scale_alg == 1 else _ocp(amax, _E4M3_EMAX)
    elif scale_alg == 2:
        exponent = _e2m1_rounded_up(amax, dst_type_max)
    else:
        exponent = _ocp(amax, _E2M1_EMAX)
    exponent = exponent.clamp(-E8M0_BIAS, 254 - E8M0_BIAS)
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1)).flatten(-2)[..., :size]
    scales = paired_scales((exponent + E8M0_BIAS).to(torch.uint8))
    if is_fp8:
        return scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scales
    return packed_e2m1(scaled), scales


def _floor_log2(x: Tensor) -> tuple[Tensor, Tensor]:
    """Exponent of x > 0 and whether its mantissa is above 1; zero gives the lowest exponent."""
    mantissa, exponent = torch.frexp(x)
    floor = torch.where(x > 0, exponent - 1, -1000)
    return floor, mantissa > 0.5


def _ocp(amax: Tensor, emax: int) -> Tensor:
    """Scenario 1: floor(log2(amax)) - emax."""
    return _floor_log2(amax)[0] - emax


def _cublas(amax: Tensor, low_bound: float) -> Tensor:
    """Scenario 2: exponent of amax / 448, up by one when the mantissa is not exactly 1."""
    if low_bound > 0.0:
        amax = amax.clamp_min(low_bound)
    floor, above = _floor_log2(amax / _E4M3_MAX)
    return floor + above.int()


def _e2m1_rounded_up(amax: Tensor, dst_type_max: float) -> Tensor:
    """Scenario 3 for maxima 0, 6 and 7: up when amax exceeds 1.5 (1.75) times its power of two."""
    if dst_type_max not in (0.0, 6.0, 7.0):
        raise _PAGE.not_emulated(f"dst_type_max {dst_type_max}")
    floor, _ = _floor_log2(amax)
    limit = 1.75 if dst_type_max == 7.0 else 1.5
    return floor + (torch.ldexp(amax, -floor.clamp_min(-1000)) > limit).int() - _E2M1_EMAX
