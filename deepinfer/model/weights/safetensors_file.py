"""The safetensors container: headers read and written without touching the data.

An own parser, because headers alone must do for `inspect`, every dtype of the release must pass
(F8_E8M0 too), and each fault must be told with the file's and the tensor's name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.device.errors import CheckpointError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 256 * 2**20
_DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file.

    Attributes:
        file: the shard that holds it.
        dtype: dtype name as the header spells it.
        shape: shape as the header states it.
        offset: first byte, counted from the start of the file.
        num_bytes: bytes of data.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of one file.

    Attributes:
        entries: tensors by name.
        file_bytes: size the file must have.
        is_truncated: the file is shorter than that.
    """

    entries: Mapping[str, TensorEntry]
    file_bytes: int
    is_truncated: bool


def read_header(file: Path) -> FileHeader:
    """Return the header of a safetensors file; reads no tensor data.

    Args:
        file: an existing file.
    Raises:
        CheckpointError: the header is damaged or contradicts itself.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(_LENGTH_BYTES)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _LENGTH_BYTES or not 2 <= length <= _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file} is not a safetensors file: header length {length}, file size {size}; "
                "copy it again"
            )
        text = stream.read(length)
    if len(text) < length:
        raise CheckpointError(
            f"{file} ends inside its header: {len(text)} of {length} bytes; copy it again"
        )
    try:
        header = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a header that is no JSON object; copy it again")
    start = _LENGTH_BYTES + length
    entries = {
        name: _entry(file, name, value, start)
        for name, value in header.items()
        if name != "__metadata__"
    }
    end = _check_layout(file, entries, start)
    return FileHeader(entries, end, is_truncated=size < end)


def _entry(file: Path, name: str, value: object, start: int) -> TensorEntry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(
            f"{file}: tensor {name} is described by {value!r}, "
            "expected dtype, shape and data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in _DTYPE_BYTES:
        raise CheckpointError(
            f"{file}: tensor {name} has the unknown dtype {dtype!r}, "
            f"expected one of {', '.join(_DTYPE_BYTES)}"
        )
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {shape!r} and data_offsets {offsets!r}, "
            "expected lists of whole numbers"
        )
    num_bytes = math.prod(shape) * _DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise CheckpointError(
            f"{file}: tensor {name} ({dtype} {shape}) needs {num_bytes} bytes, "
            f"data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return TensorEntry(file, dtype, tuple(shape), start + offsets[0], num_bytes)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _check_layout(file: Path, entries: Mapping[str, TensorEntry], start: int) -> int:
    """Return the end of the data after checking that tensors neither overlap nor leave holes."""
    position = start
    for name, entry in sorted(
        entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)
    ):
        if entry.offset != position:
            raise CheckpointError(
                f"{file}: tensor {name} starts at byte {entry.offset}, "
                f"the one before ends at {position}; tensors overlap or leave a hole"
            )
        position += entry.num_bytes
    return position


def encode_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return length and header of a file whose data follow in the given order.

    Args:
        tensors: name, dtype name and shape of each.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * _DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Blanks keep the data aligned for readers that map it.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of a safetensors dtype name."""
    return _DTYPE_BYTES[dtype]
