"""Byte formats of cache rows: how a row of values is stored, and given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.device import formats
from deepinfer.device.backend import CacheKind
from deepinfer.device.numerics import Numerics
from deepinfer_ascend950.operators import NpuOperators


@dataclass(frozen=True, slots=True)
class Record:
    """One row format.

    Attributes:
        name: as reports name it.
        bytes_per_row: bytes of a row of a given width.
        encode: activations [n, width] to bytes [n, row bytes] uint8.
        encode_canonical: fp32 values [n, width] that the record holds exactly, to their bytes.
        decode: bytes to fp32 values [n, width].
    """

    name: str
    bytes_per_row: Callable[[int], int]
    encode: Callable[[Tensor], Tensor]
    encode_canonical: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


def record_of(kind: CacheKind, numerics: Numerics, npu: NpuOperators) -> Record:
    """The record of a cache kind: fp32 in exact numerics, else V4.1's own bytes."""
    if numerics is Numerics.EXACT:
        return Record("f32", lambda width: 4 * width, _f32_bytes, _f32_bytes, _f32_values)
    if kind is CacheKind.WINDOW:
        encode = _WindowEncoder(npu)
        return Record(
            "window_mxfp8:e4m3+ue8m0", lambda width: width + width // 32, encode, encode, _window
        )
    if kind is CacheKind.COMPRESSED:
        return Record(
            "compressed_fp4:e2m1+e4m3",
            lambda width: width // 2 + width // 16,
            _compressed_bytes,
            _canonical_compressed_bytes,
            _compressed,
        )
    return Record(
        "index_mxfp4:e2m1+ue8m0",
        lambda width: width // 2 + width // 32,
        _index_bytes,
        _index_bytes,
        _index,
    )


def _f32_bytes(x: Tensor) -> Tensor:
    return x.float().contiguous().view(torch.uint8)


def _f32_values(raw: Tensor) -> Tensor:
    return raw.view(torch.float32)


class _WindowEncoder:
    """e4m3 of all values, then one ue8m0 for each 32."""

    def __init__(self, npu: NpuOperators) -> None:
        self._npu = npu

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = self._npu.mx_quantize(x)
        return torch.cat((codes.view(torch.uint8), scales.flatten(1)[:, : x.shape[1] // 32]), 1)


def _window(raw: Tensor) -> Tensor:
    width = raw.shape[1] * 32 // 33
    codes = raw[:, :width].contiguous().view(torch.float8_e4m3fn)
    return formats.dequantize_a8(codes, raw[:, width:])


def _compressed_bytes(x: Tensor) -> Tensor:
    packed, scales = formats.quantize_q4_e4m3(x)
    return torch.cat((packed, scales.view(torch.uint8)), dim=1)


def _canonical_compressed_bytes(values: Tensor) -> Tensor:
    """Bytes that give exactly `values` back.

    Quantising them a second time need not: the largest value may have come from another code
    than 6. Every code it can have come from is tried.
    """
    grouped: Tensor = values.float().unflatten(-1, (-1, formats.NVFP4_GROUP))
    amax = grouped.abs().amax(-1, keepdim=True)
    scale = torch.full_like(amax, 2.0**-9)
    found = amax == 0
    for code in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        candidate = (amax / code).clamp(2.0**-9, formats.E4M3_MAX).to(torch.float8_e4m3fn).float()
        back = formats.round_e2m1(grouped / candidate) * candidate
        fits = (back == grouped).all(-1, keepdim=True)
        scale, found = torch.where(fits, candidate, scale), found | fits
    codes = formats.pack_e2m1(formats.round_e2m1(grouped / scale).flatten(-2))
    return torch.cat((codes, scale.squeeze(-1).to(torch.float8_e4m3fn).view(torch.uint8)), dim=1)


def _compressed(raw: Tensor) -> Tensor:
    half = raw.shape[1] * 8 // 9
    scales = raw[:, half:].contiguous().view(torch.float8_e4m3fn)
    return formats.dequantize_q4_e4m3(raw[:, :half], scales)


def _index_bytes(x: Tensor) -> Tensor:
    return torch.cat(formats.quantize_q4_ue8m0(x), dim=1)


def _index(raw: Tensor) -> Tensor:
    half = raw.shape[1] * 16 // 17
    return formats.dequantize_q4_ue8m0(raw[:, :half], raw[:, half:])
