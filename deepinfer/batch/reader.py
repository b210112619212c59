"""Reading a file of requests line by line, with memory for one line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from deepinfer.batch.request import BadLineError, BatchRequest, ErrorCode, parse_request

MAX_LINE_BYTES = 64 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SKIP_CHUNK_BYTES = 1024 * 1024


def read_requests(
    path: Path, *, defaults: Mapping[str, Any] | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[BatchRequest | BadLineError]:
    """The requests of a file in order; a line that is none comes as the error that says why.

    Blank lines are skipped but counted. A byte order mark, CRLF and a missing last newline are
    fine. Besides one line, what stays in memory is 16 bytes for every `custom_id` seen.

    Args:
        path: UTF-8, one JSON object a line.
        defaults: fields of `SamplingParams` for lines that do not give them.
        max_line_bytes: a longer line is an error of that line, and is not kept in memory.
    Raises:
        OSError: the file cannot be read.
    """
    seen: set[bytes] = set()
    with path.open("rb") as file:
        for line_number, data in _lines(file, max_line_bytes):
            try:
                line = _decode(line_number, data, max_line_bytes)
                _check_unique(line_number, line, seen)
                yield parse_request(line_number, line, defaults or {})
            except BadLineError as error:
                yield error


def count_requests(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> int:
    """Number of lines that will get a record, good or bad: all but the blank ones.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return sum(1 for _ in _lines(file, max_line_bytes))


def _lines(file: IO[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Number and bytes of every line that is not blank; None for the bytes of an over-long one."""
    line_number = 0
    while data := file.readline(max_line_bytes + 1):
        line_number += 1
        if line_number == 1:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if len(data) > max_line_bytes and not data.endswith(b"\n"):
            while data and not data.endswith(b"\n"):
                data = file.readline(_SKIP_CHUNK_BYTES)
            yield line_number, None
        elif data.strip():
            yield line_number, data


def _decode(line_number: int, data: bytes | None, max_line_bytes: int) -> dict[str, Any]:
    if data is None:
        raise BadLineError(
            f"the line has more than {max_line_bytes} bytes; make it shorter",
            line_number=line_number,
            code=ErrorCode.LINE_TOO_LONG,
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLineError(
            f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8; "
            "save the file as UTF-8",
            line_number=line_number,
            code=ErrorCode.INVALID_UTF8,
        ) from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise BadLineError(
            f"not valid JSON: {error}; expected one object a line",
            line_number=line_number,
            code=ErrorCode.INVALID_JSON,
        ) from error
    if not isinstance(value, dict):
        raise BadLineError(
            f"the line holds {type(value).__name__}; expected a JSON object",
            line_number=line_number,
            code=ErrorCode.INVALID_JSON,
        )
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} appears twice in one object")
    return value


def _check_unique(line_number: int, line: Mapping[str, Any], seen: set[bytes]) -> None:
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str):
        return  # the parser says so
    digest = hashlib.blake2b(custom_id.encode("utf-8"), digest_size=16).digest()
    if digest in seen:
        raise BadLineError(
            f"custom_id={custom_id!r} was used on an earlier line; answers are matched by it, "
            "so every line needs its own",
            line_number=line_number,
            code=ErrorCode.DUPLICATE_CUSTOM_ID,
            custom_id=custom_id,
            field="custom_id",
        )
    seen.add(digest)
