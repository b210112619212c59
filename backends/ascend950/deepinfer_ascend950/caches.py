"""Row caches: rows of bytes on the device, written without asking which are skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer_ascend950.handles import own_handle
from deepinfer_ascend950.operators import NpuOperators
from deepinfer_ascend950.records import Record

# Every record reads a byte of ones as NaN: e4m3, ue8m0 and fp32 alike.
_POISON = -1


class ByteRows:
    """[num_rows + 1, row bytes] int8; the row behind the last takes what is to be skipped.

    Finding out which rows are skipped would make the host wait for the device. int8, because
    the scatter operator takes no uint8.
    """

    def __init__(
        self,
        record: Record,
        num_rows: int,
        width: int,
        *,
        npu: NpuOperators,
        device: torch.device,
    ) -> None:
        self.format = record
        self._width, self._npu = width, npu
        shape = (num_rows + 1, record.bytes_per_row(width))
        self._storage = torch.zeros(shape, dtype=torch.int8, device=device)

    @property
    def record(self) -> str:
        return self.format.name

    @property
    def num_rows(self) -> int:
        return self._storage.shape[0] - 1

    @property
    def width(self) -> int:
        return self._width

    @property
    def row_bytes(self) -> int:
        return self._storage.shape[1]

    def put(self, slots: Tensor, raw: Tensor) -> None:
        """Write bytes [n, row bytes] uint8 to slots [n]; -1 skips."""
        if slots.shape[0] == 0:
            return
        target = torch.where(slots < 0, self.num_rows, slots)
        self._npu.put_rows(self._storage, target, raw.view(torch.int8))

    def take(self, slots: Tensor) -> Tensor:
        """Bytes [n, row bytes] uint8 of slots [n]; -1 gives row 0, to be masked by the caller."""
        return self._storage.index_select(0, slots.clamp_min(0)).view(torch.uint8)

    def store(self, slots: Tensor, x: Tensor) -> None:
        """Quantise activations [n, width] and write them to slots [n]; -1 skips."""
        if slots.shape[0]:
            self.put(slots, self.format.encode(x))

    def gather(self, slots: Tensor) -> Tensor:
        """fp32 values [..., width] of slots; -1 gives row 0, to be masked by the caller."""
        values = self.format.decode(self.take(slots.flatten()))
        return values.view(*slots.shape, self._width)

    def round_trip(self, x: Tensor) -> Tensor:
        """Activations x [..., width] as this record would give them back, fp32."""
        flat = x.reshape(-1, self._width)
        return self.format.decode(self.format.encode(flat)).view(x.shape)

    def byte_view(self, first_row: int, num_rows: int) -> Tensor:
        if first_row < 0 or first_row + num_rows > self.num_rows:
            raise ContractError(
                f"byte_view of rows {first_row}..{first_row + num_rows - 1} of a cache of "
                f"{self.num_rows} rows; ask for rows that exist"
            )
        return self._storage[first_row : first_row + num_rows].view(torch.uint8)

    def pack(self, slots: Tensor, values: Tensor) -> None:
        if slots.shape[0]:
            self.put(slots, self.format.encode_canonical(values))

    def unpack(self, slots: Tensor) -> Tensor:
        return self.gather(slots)

    def poison(self, slots: Tensor) -> None:
        rows = slots.to(self._storage.device)
        self._storage.index_fill_(0, rows, _POISON)


def byte_rows(cache: object) -> ByteRows:
    """This backend's own cache class behind a handle; another backend's handle is an error."""
    return own_handle(cache, ByteRows)
