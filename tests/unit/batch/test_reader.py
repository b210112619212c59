"""Reading requests: good lines, and one error for each bad one."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.batch.reader import count_requests, read_requests
from deepinfer.batch.request import BadLineError, BatchRequest, ErrorCode

Line = Callable[..., bytes]
InputFile = Callable[..., Path]


def _good_ids(path: Path) -> list[str]:
    return [item.custom_id for item in read_requests(path) if isinstance(item, BatchRequest)]


def _only_error(path: Path) -> BadLineError:
    (error,) = [item for item in read_requests(path) if isinstance(item, BadLineError)]
    return error


def test_blank_lines_are_skipped_and_counted(input_file: InputFile, line: Line) -> None:
    path = input_file(line("a"), b"\n", b"  \t\n", line("b").rstrip())
    items = list(read_requests(path))
    assert [(item.custom_id, item.line_number) for item in items] == [("a", 1), ("b", 4)]


def test_byte_order_mark_is_no_part_of_the_first_line(input_file: InputFile, line: Line) -> None:
    assert _good_ids(input_file(b"\xef\xbb\xbf", line("a"), line("b"))) == ["a", "b"]


def test_carriage_returns_are_fine(input_file: InputFile, line: Line) -> None:
    path = input_file(line("a").replace(b"\n", b"\r\n"), b"\r\n", line("b"))
    assert _good_ids(path) == ["a", "b"]


def test_empty_file_has_no_requests(input_file: InputFile) -> None:
    assert list(read_requests(input_file())) == []


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b'{"custom_id": "\xff"}\n', ErrorCode.INVALID_UTF8),
        (b'{"custom_id": "x"\n', ErrorCode.INVALID_JSON),
        (b"[1]\n", ErrorCode.INVALID_JSON),
        (b"7\n", ErrorCode.INVALID_JSON),
        (b'{"custom_id": NaN}\n', ErrorCode.INVALID_JSON),
        (b'{"custom_id": -Infinity}\n', ErrorCode.INVALID_JSON),
        (b'{"custom_id": "x", "custom_id": "y"}\n', ErrorCode.INVALID_JSON),
        (b'{"custom_id": "\\ud800"}\n', ErrorCode.INVALID_JSON),
        (b'{"custom_id":' + b"[" * 100_000 + b"\n", ErrorCode.INVALID_JSON),
        (b"1" * 5000 + b"\n", ErrorCode.INVALID_JSON),
        (b"{}\n", ErrorCode.INVALID_FIELD),
    ],
)
def test_bad_line_is_one_error_with_its_number(
    input_file: InputFile, line: Line, bad: bytes, code: ErrorCode
) -> None:
    path = input_file(line("a"), bad, line("b"))
    error = _only_error(path)
    assert (error.line_number, error.code) == (2, code)
    assert _good_ids(path) == ["a", "b"]


def test_repeated_custom_id_is_an_error_of_the_later_line(
    input_file: InputFile, line: Line
) -> None:
    error = _only_error(input_file(line("a"), line("b"), line("a")))
    assert (error.line_number, error.custom_id) == (3, "a")
    assert error.code is ErrorCode.DUPLICATE_CUSTOM_ID


def test_line_at_the_limit_is_read_and_one_beyond_is_an_error(
    input_file: InputFile, line: Line
) -> None:
    first, second = line("a"), line("b", prompt="hello!")
    limit = len(first) - 1  # the newline does not count
    items = list(read_requests(input_file(first, second, line("c")), max_line_bytes=limit))
    assert isinstance(items[0], BatchRequest)
    assert isinstance(items[1], BadLineError)
    assert (items[1].line_number, items[1].code) == (2, ErrorCode.LINE_TOO_LONG)
    assert isinstance(items[2], BatchRequest)


def test_over_long_last_line_without_newline_is_an_error(input_file: InputFile) -> None:
    (item,) = read_requests(input_file(b"x" * 500), max_line_bytes=100)
    assert isinstance(item, BadLineError)
    assert item.code is ErrorCode.LINE_TOO_LONG


def test_over_long_line_is_not_kept_in_memory(input_file: InputFile, line: Line) -> None:
    path = input_file(b"x" * 20_000_000 + b"\n", line("a"))
    tracemalloc.start()
    items = list(read_requests(path, max_line_bytes=1000))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(items) == 2
    assert peak_bytes < 4_000_000


def test_requests_are_read_one_at_a_time(input_file: InputFile, line: Line) -> None:
    path = input_file(*(line(f"{i}", prompt="x" * 100_000) for i in range(100)))
    tracemalloc.start()
    num_requests = sum(1 for _ in read_requests(path))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_requests == 100
    assert peak_bytes < 2_000_000


def test_count_is_the_number_of_records(input_file: InputFile, line: Line) -> None:
    path = input_file(line("a"), b"\n", b"garbage\n", b"   \n", line("b").rstrip())
    assert count_requests(path) == len(list(read_requests(path))) == 3


def test_defaults_apply_where_a_line_says_nothing(input_file: InputFile, line: Line) -> None:
    path = input_file(line("a"), line("b", temperature=0.5))
    items = list(read_requests(path, defaults={"temperature": 0.0}))
    temperatures = [item.params.temperature for item in items if isinstance(item, BatchRequest)]
    assert temperatures == [0.0, 0.5]


def test_text_beyond_ascii_survives_both_spellings(input_file: InputFile, line: Line) -> None:
    escaped = line("a", prompt="世界 🎉")
    literal = json.dumps(json.loads(line("b", prompt="世界 🎉")), ensure_ascii=False).encode()
    items = list(read_requests(input_file(escaped, literal)))
    assert [getattr(item, "prompt", None) for item in items] == ["世界 🎉", "世界 🎉"]
