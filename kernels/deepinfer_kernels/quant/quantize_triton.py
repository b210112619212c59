"""The three quantisers: e4m3 with ue8m0 / 32, E2M1 with ue8m0 / 32, E2M1 with e4m3 / 16.

`round_a8` is the first of them followed by dequantisation, which bf16 holds exactly: products on
bf16 tensor cores take their activations so, instead of dequantising them in every tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.formats_triton import (
    a8_scale,
    e2m1_code,
    e4m3_code,
    inverse_pow2,
    pack_nibbles,
    q4_e4m3_scale,
    q4_ue8m0_scale,
    ue8m0_byte,
)

_GROUPS = 32
"""Groups of one program."""


@triton.jit(do_not_specialize=["num_groups"])
def _quantize(
    x_ptr, codes_ptr, scales_ptr, num_groups, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (group < num_groups)[:, None]
    column = tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + group[:, None] * GROUP + column, mask=inside, other=0.0).to(tl.float32)
    if FORMAT == "mxfp8":
        scale = a8_scale(x)
        code = e4m3_code(x * inverse_pow2(scale)).to(tl.uint8, bitcast=True)
        tl.store(codes_ptr + group[:, None] * GROUP + column, code, mask=inside)
        tl.store(scales_ptr + group[:, None], ue8m0_byte(scale), mask=inside)
    else:
        if FORMAT == "mxfp4":
            scale = q4_ue8m0_scale(x)
            byte = ue8m0_byte(scale)
            code = e2m1_code(x * inverse_pow2(scale))
        else:
            rounded = q4_e4m3_scale(x)
            byte = rounded.to(tl.uint8, bitcast=True)
            code = e2m1_code(tl.div_rn(x, tl.broadcast_to(rounded.to(tl.float32), x.shape)))
        packed = pack_nibbles(code, GROUPS, GROUP)
        half = tl.arange(0, GROUP // 2)[None, :]
        tl.store(codes_ptr + group[:, None] * (GROUP // 2) + half, packed, mask=inside)
        tl.store(scales_ptr + group[:, None], byte, mask=inside)


@triton.jit(do_not_specialize=["num_groups"])
def _round_a8(x_ptr, out_ptr, num_groups, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (group < num_groups)[:, None]
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = a8_scale(x)
    value = e4m3_code(x * inverse_pow2(scale)).to(tl.float32) * scale
    tl.store(out_ptr + at, value.to(tl.bfloat16), mask=inside)


def _run(x: Tensor, fmt: str, group: int) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    width = x.shape[-1]
    lead = x.shape[:-1]
    codes_width = width if fmt == "mxfp8" else width // 2
    codes = torch.empty((*lead, codes_width), dtype=torch.uint8, device=x.device)
    scales = torch.empty((*lead, width // group), dtype=torch.uint8, device=x.device)
    num_groups = scales.numel()
    if num_groups:
        _quantize[(triton.cdiv(num_groups, _GROUPS),)](
            x, codes, scales, num_groups, FORMAT=fmt, GROUP=group, GROUPS=_GROUPS
        )
    return codes, scales


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., N] bf16 or fp32 -> codes [..., N] float8_e4m3fn, scales [..., N / 32] uint8."""
    codes, scales = _run(x, "mxfp8", 32)
    return codes.view(torch.float8_e4m3fn), scales


def round_a8(x: Tensor) -> Tensor:
    """x [..., N] bf16 or fp32 -> [..., N] bf16, the values that `quantize_a8` keeps."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    num_groups = x.numel() // 32
    if num_groups:
        _round_a8[(triton.cdiv(num_groups, _GROUPS),)](x, out, num_groups, GROUPS=_GROUPS)
    return out


def quantize_q4_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., N] -> bytes [..., N / 2] uint8, scales [..., N / 32] uint8 (ue8m0)."""
    return _run(x, "mxfp4", 32)


def quantize_q4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., N] -> bytes [..., N / 2] uint8, scales [..., N / 16] float8_e4m3fn."""
    codes, scales = _run(x, "nvfp4", 16)
    return codes, scales.view(torch.float8_e4m3fn)


def quantize_a8_truth(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_a8` in plain torch."""
    grouped = x.float().unflatten(-1, (-1, 32))
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448.0))).float()
    codes = (grouped / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(-2), (torch.log2(scale).squeeze(-1) + 127).to(torch.uint8)


def round_a8_truth(x: Tensor) -> Tensor:
    """`round_a8` in plain torch."""
    codes, scales = quantize_a8_truth(x)
    factor = torch.exp2(scales.float() - 127.0).repeat_interleave(32, -1)
    return (codes.float() * factor).to(torch.bfloat16)


_SIGNATURE = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*u8", "num_groups": "i32"}
COMPILE_CASES = (
    *(
        CompileCase("_quantize", _SIGNATURE, {"FORMAT": fmt, "GROUP": group, "GROUPS": _GROUPS})
        for fmt, group in (("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16))
    ),
    CompileCase(
        "_round_a8", {"x_ptr": "*bf16", "out_ptr": "*bf16", "num_groups": "i32"},
        {"GROUPS": _GROUPS},
    ),
)  # fmt: skip
