"""Row caches in the real V4.1 records: codes first, their scales behind, row after row."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device import formats
from deepinfer.device.backend import CacheKind
from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer_cuda_sm100.handles import own_handle

_FORMATS = {
    CacheKind.WINDOW: "mxfp8",
    CacheKind.COMPRESSED: "nvfp4",
    CacheKind.INDEX: "mxfp4",
}
_RECORDS = {
    "plain": "f32",
    "mxfp8": "window_mxfp8:rows",
    "nvfp4": "compressed_fp4:rows",
    "mxfp4": "index_mxfp4:rows",
}
_GROUPS = {"mxfp8": 32, "nvfp4": 16, "mxfp4": 32}
# A group's largest code, in falling order of how often a quantiser leaves it the largest.
_LARGEST_E2M1 = (6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5)
_POISON_BYTE = 0xFF
"""NaN as fp32, as an e4m3 code, as an e4m3 scale and as a ue8m0 scale."""


def cache_format(kind: CacheKind, numerics: Numerics) -> str:
    """`plain` in exact numerics, else the format of the kind's record."""
    return "plain" if numerics is Numerics.EXACT else _FORMATS[kind]


def row_bytes(fmt: str, width: int) -> int:
    """Bytes of a row: 528 for 512 window values, 288 compressed, 68 for 128 of an index key."""
    if fmt == "plain":
        return 4 * width
    codes = width if fmt == "mxfp8" else width // 2
    return codes + width // _GROUPS[fmt]


class RecordRows:
    """[num_rows, row_bytes] bytes; fp32 rows in exact numerics."""

    def __init__(self, fmt: str, num_rows: int, width: int, device: torch.device) -> None:
        """Zeroed rows.

        Args:
            fmt: `plain`, `mxfp8`, `nvfp4` or `mxfp4`.
            num_rows: rows.
            width: values of a row.
            device: where they lie.
        Raises:
            ContractError: the width is no multiple of the format's group.
        """
        if fmt != "plain" and width % _GROUPS[fmt]:
            raise ContractError(
                f"a cache of record {_RECORDS[fmt]} has rows of {width} values; expected a "
                f"multiple of {_GROUPS[fmt]}, the group that shares a scale"
            )
        self.format = fmt
        self._width = width
        if fmt == "plain":
            self.rows = torch.zeros((num_rows, width), dtype=torch.float32, device=device)
        else:
            self.rows = torch.zeros(
                (num_rows, row_bytes(fmt, width)), dtype=torch.uint8, device=device
            )

    @property
    def record(self) -> str:
        return _RECORDS[self.format]

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def width(self) -> int:
        return self._width

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.format, self._width)

    @property
    def bytes(self) -> Tensor:
        """[num_rows, row_bytes] uint8 view."""
        return self.rows.view(torch.uint8)

    def byte_view(self, first_row: int, num_rows: int) -> Tensor:
        if first_row < 0 or first_row + num_rows > self.num_rows:
            raise ContractError(
                f"byte_view of rows {first_row}..{first_row + num_rows - 1} of a cache of "
                f"{self.num_rows} rows; ask for rows that exist"
            )
        return self.bytes[first_row : first_row + num_rows]

    def pack(self, slots: Tensor, values: Tensor) -> None:
        slots = slots.to(self.rows.device)
        values = values.to(self.rows.device)
        if self.format == "plain":
            self.rows[slots] = values
            return
        if self.format == "mxfp8":
            codes, scales = formats.quantize_a8(values)
        elif self.format == "mxfp4":
            codes, scales = formats.quantize_q4_ue8m0(values)
        else:
            codes, scales = _exact_nvfp4(values)
        self.rows[slots] = torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=1)

    def unpack(self, slots: Tensor) -> Tensor:
        found = self.rows[slots.to(self.rows.device)]
        if self.format == "plain":
            return found
        split = self.width if self.format == "mxfp8" else self.width // 2
        codes, scales = found[:, :split].contiguous(), found[:, split:].contiguous()
        if self.format == "mxfp8":
            return formats.dequantize_a8(codes.view(torch.float8_e4m3fn), scales)
        if self.format == "mxfp4":
            return formats.dequantize_q4_ue8m0(codes, scales)
        return formats.dequantize_q4_e4m3(codes, scales.view(torch.float8_e4m3fn))

    def poison(self, slots: Tensor) -> None:
        self.bytes[slots.to(self.rows.device)] = _POISON_BYTE


def _exact_nvfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and e4m3 scales whose products are `values` [n, N] exactly.

    The quantiser does not give stored values back for small groups, whose scales are coarse: the
    scale is searched among those that make the largest value one of the codes.
    """
    grouped = values.unflatten(-1, (-1, _GROUPS["nvfp4"]))
    amax = grouped.abs().amax(-1, keepdim=True)
    codes, scales = formats.quantize_q4_e4m3(values)
    scale = scales.float().unsqueeze(-1)
    for largest in _LARGEST_E2M1[::-1]:
        # float8 conversion is exact where `largest` is the right divisor.
        candidate = (amax / largest).clamp(2.0**-9, formats.E4M3_MAX)
        candidate = candidate.to(torch.float8_e4m3fn).float()
        held = formats.round_e2m1(grouped / candidate) * candidate
        fits = (held == grouped).all(-1, keepdim=True)
        scale = torch.where(fits, candidate, scale)
    codes = formats.pack_e2m1(formats.round_e2m1(grouped / scale).flatten(-2))
    return codes, scale.squeeze(-1).to(torch.float8_e4m3fn)


def record_rows(cache: object) -> RecordRows:
    """The backend's own cache class behind a handle; another backend's handle is an error."""
    return own_handle(cache, RecordRows)
