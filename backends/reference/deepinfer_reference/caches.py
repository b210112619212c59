"""Row caches of the reference: dequantised values, identical to what the records would hold.

A device stores 528, 288 or 68 bytes a row; the reference keeps the round-trip values of that
record in bf16, which holds them exactly, or plain fp32 rows in exact numerics.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.errors import ContractError
from deepinfer.device.formats import round_trip_a8, round_trip_q4_e4m3, round_trip_q4_ue8m0
from deepinfer.device.numerics import Numerics
from deepinfer_reference.handles import own_handle

_ROUND_TRIPS: dict[CacheKind, tuple[str, Callable[[Tensor], Tensor]]] = {
    CacheKind.WINDOW: ("window_mxfp8:bf16", round_trip_a8),
    CacheKind.COMPRESSED: ("compressed_fp4:bf16", round_trip_q4_e4m3),
    CacheKind.INDEX: ("index_mxfp4:bf16", round_trip_q4_ue8m0),
}


class DenseRows:
    """[num_rows, width] values in the activation dtype, rounded as the record rounds."""

    def __init__(self, kind: CacheKind, num_rows: int, width: int, numerics: Numerics) -> None:
        exact = numerics is Numerics.EXACT
        self.kind = kind
        # One row more, behind the others, takes what slot -1 skips.
        self._storage = torch.zeros(
            (num_rows + 1, width), dtype=torch.float32 if exact else torch.bfloat16
        )
        self.values = self._storage[:num_rows]
        self._record = "f32"
        self._round_trip: Callable[[Tensor], Tensor] | None = None
        if not exact:
            self._record, self._round_trip = _ROUND_TRIPS[kind]

    @property
    def record(self) -> str:
        return self._record

    @property
    def num_rows(self) -> int:
        return self.values.shape[0]

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def row_bytes(self) -> int:
        return self.width * self.values.element_size()

    def quantize(self, x: Tensor) -> Tensor:
        """x [..., width] as this record would give it back, fp32."""
        return x.float() if self._round_trip is None else self._round_trip(x)

    def store(self, slots: Tensor, values: Tensor) -> None:
        """Write already quantised values [n, width] to slots [n]; -1 skips."""
        rows = slots.remainder(self._storage.shape[0])  # -1 becomes the last row
        self._storage.index_copy_(0, rows, values.to(self.values.dtype))

    def gather(self, slots: Tensor) -> Tensor:
        """fp32 values [..., width] of slots; -1 gives row 0, to be masked by the caller."""
        flat = self.values.index_select(0, slots.clamp_min(0).flatten())
        return flat.float().view(*slots.shape, self.width)

    def byte_view(self, first_row: int, num_rows: int) -> Tensor:
        if first_row < 0 or first_row + num_rows > self.num_rows:
            raise ContractError(
                f"byte_view of rows {first_row}..{first_row + num_rows - 1} of a cache of "
                f"{self.num_rows} rows; ask for rows that exist"
            )
        return self.values[first_row : first_row + num_rows].view(torch.uint8)

    def pack(self, slots: Tensor, values: Tensor) -> None:
        self.store(slots, values)

    def unpack(self, slots: Tensor) -> Tensor:
        return self.values.index_select(0, slots).float()

    def poison(self, slots: Tensor) -> None:
        self.values[slots] = float("nan")


def dense_rows(cache: object) -> DenseRows:
    """The reference's own cache class behind a handle; another backend's handle is an error."""
    return own_handle(cache, DenseRows)
