"""Reading Engram rows, and adding their gated value to every stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.formats_triton import ue8m0_value


@triton.jit
def _fetch(
    table_ptr, scales_ptr, rows_ptr, out_ptr, width, CODES: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + at).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    stored = tl.load(table_ptr + row * width + column, mask=inside, other=0)
    if CODES:
        scale = tl.load(scales_ptr + row * (width // 32) + column // 32, mask=inside, other=0)
        value = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32) * ue8m0_value(scale)
    else:
        value = stored.to(tl.float32)
    tl.store(out_ptr + at * width + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _inject(
    streams_ptr, kv_ptr, weight_ptr, dead_ptr, out_ptr, width, eps,
    M: tl.constexpr, HAS_DEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = (row * M + stream) * width + column
    hidden = tl.load(streams_ptr + at, mask=inside, other=0.0).to(tl.float32)
    base = kv_ptr + row * (M + 1) * width
    key = tl.load(base + stream * width + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(base + M * width + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + stream * width + column, mask=inside, other=0.0)
    dot = tl.sum(hidden * weight * key, axis=0)
    dot = dot * tl.rsqrt(tl.sum(hidden * hidden, axis=0) / width + eps)
    dot = dot * tl.rsqrt(tl.sum(key * key, axis=0) / width + eps)
    dot = dot * tl.rsqrt(width.to(tl.float32))
    root = tl.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
    negative = (dot.to(tl.int32, bitcast=True)) < 0  # the sign of -0 counts
    root = tl.where(negative, -root, root)
    gate = 1.0 / (1.0 + tl.exp(-root))
    if HAS_DEAD:
        gate = tl.where(tl.load(dead_ptr + row) != 0, 0.0, gate)
    tl.store(out_ptr + at, (hidden + gate * value).to(out_ptr.dtype.element_ty), mask=inside)


def fetch(table: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table, decoded, side by side.

    Args:
        table: [R, N] uint8 (e4m3 codes) with scales, or floats; on the device or pinned.
        scales: [R, N / 32] uint8 (ue8m0) or None.
        rows: [T, columns] int64.
        dtype: of the result.

    Returns:
        [T, columns * N].
    """
    rows = rows.contiguous()
    width = table.shape[1]
    out = torch.empty((rows.shape[0], rows.shape[1] * width), dtype=dtype, device=rows.device)
    if out.numel():
        _fetch[(rows.numel(),)](
            table, scales, rows, out, width, CODES=scales is not None,
            BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return out


def inject(
    streams: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, *, eps: float
) -> Tensor:
    """h + sigmoid(signed root of the normalised <h, k>) * v for every stream.

    Args:
        streams: [T, M, D] bf16 or fp32.
        kv: [T, (M + 1) * D] same dtype: a key per stream, then the value.
        weight: [M, D] fp32, product of both norm weights.
        dead: [T] bool rows without injection, or None.
        eps: eps of both norms.

    Returns:
        [T, M, D], one cast.
    """
    streams = streams.contiguous()
    num_rows, m, width = streams.shape
    out = torch.empty_like(streams)
    if out.numel():
        block = triton.next_power_of_2(width)
        _inject[(num_rows, m)](
            streams, kv.contiguous(), weight.contiguous(),
            None if dead is None else dead.contiguous(), out, width, eps, M=m,
            HAS_DEAD=dead is not None, BLOCK=block, num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return out


def fetch_truth(table: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`fetch` in plain torch."""
    found = table[rows]
    if scales is not None:
        factor = torch.exp2(scales[rows].float() - 127.0).repeat_interleave(32, -1)
        found = found.view(torch.float8_e4m3fn).float() * factor
    return found.to(dtype).flatten(1)


def inject_truth(
    streams: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, *, eps: float
) -> Tensor:
    """`inject` in plain torch, float64."""
    _, m, width = streams.shape
    hidden, split = streams.double(), kv.double().unflatten(1, (m + 1, width))
    keys, value = split[:, :m], split[:, m:]
    dot = (hidden * weight.double() * keys).sum(-1)
    for x in (hidden, keys):
        dot = dot * torch.rsqrt(x.square().mean(-1) + eps)
    dot = dot * width**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    if dead is not None:
        gate = gate.masked_fill(dead.unsqueeze(1), 0.0)
    return (hidden + gate.unsqueeze(-1) * value).to(streams.dtype)


COMPILE_CASES = (
    CompileCase(
        "_fetch",
        {
            "table_ptr": "*u8", "scales_ptr": "*u8", "rows_ptr": "*i64", "out_ptr": "*bf16",
            "width": "i32",
        },
        {"CODES": True, "BLOCK": 256},
        num_warps=1,
    ),
    CompileCase(
        "_inject",
        {
            "streams_ptr": "*bf16", "kv_ptr": "*bf16", "weight_ptr": "*fp32", "dead_ptr": "*i1",
            "out_ptr": "*bf16", "width": "i32", "eps": "fp32",
        },
        {"M": 4, "HAS_DEAD": True, "BLOCK": 8192},
        num_warps=8,
    ),
)  # fmt: skip
