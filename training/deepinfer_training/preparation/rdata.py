"""Text of R packages: the string vectors of a lazy-load database."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from deepinfer.device.errors import ConfigError

# Low byte of an item's flags in R's XDR serialisation.
_STRING_VECTOR = re.compile(rb"\x00[\x00-\x0f][\x00-\xff]\x10")
_STRING = 9
_NOT_AVAILABLE = -1


def string_vectors(file: Path) -> Iterator[list[str]]:
    """Every string vector of an .rdb file with its elements, in file order.

    Args:
        file: records of a 4-byte big-endian length and a zlib stream of that many bytes.
    Raises:
        ConfigError: the file is not built like that.
    """
    content, start = file.read_bytes(), 0
    while start < len(content):
        (length,) = struct.unpack_from(">I", content, start)
        stream = zlib.decompressobj()
        try:
            record = stream.decompress(content[start + 4 :])
        except zlib.error as error:
            raise ConfigError(f"{file}: record at byte {start} is not zlib: {error}") from None
        if len(record) != length:
            raise ConfigError(f"{file}: record at byte {start} has {len(record)} bytes, says "
                              f"{length}")  # fmt: skip
        yield from _vectors(record)
        start = len(content) - len(stream.unused_data)


def _vectors(record: bytes) -> Iterator[list[str]]:
    position = 0
    while found := _STRING_VECTOR.search(record, position):
        vector = _vector(record, found.end())
        if vector is None:
            position = found.start() + 1
        else:
            lines, position = vector
            yield lines


def _vector(record: bytes, position: int) -> tuple[list[str], int] | None:
    """Strings of the vector whose length stands at `position`, and where it ends."""
    if position + 4 > len(record):
        return None
    (count,) = struct.unpack_from(">i", record, position)
    position += 4
    if not 0 < count <= (len(record) - position) // 8:
        return None
    lines = []
    for _ in range(count):
        if position + 8 > len(record) or record[position + 3] != _STRING:
            return None
        (length,) = struct.unpack_from(">i", record, position + 4)
        position += 8
        if length < _NOT_AVAILABLE or position + length > len(record):
            return None
        if length != _NOT_AVAILABLE:
            lines.append(record[position : position + length].decode("utf-8", "replace"))
            position += length
    return lines, position
