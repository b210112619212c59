"""The container format: what is read, and each damage by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.device.errors import CheckpointError
from deepinfer.model.weights.safetensors_file import encode_header, read_header


def _write(file: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_header_of_the_public_writer_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, file)
    header = read_header(file)
    assert (header.entries["a"].dtype, header.entries["a"].shape) == ("F32", (2, 3))
    assert header.entries["b"].num_bytes == 8
    assert (header.file_bytes, header.is_truncated) == (file.stat().st_size, False)


def test_public_reader_reads_our_header(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    header = encode_header([("a", "F32", (2,)), ("b", "I8", (3,))])
    assert len(header) % 8 == 0
    file.write_bytes(header + torch.tensor([1.0, 2.0]).numpy().tobytes() + b"\x01\x02\x03")
    loaded = load_file(file)
    assert loaded["a"].tolist() == [1.0, 2.0]
    assert loaded["b"].tolist() == [1, 2, 3]


def test_zero_element_tensor_is_read(tmp_path: Path) -> None:
    file = _write(tmp_path / "a", {"a": _entry("F32", [0, 5], 0, 0)})
    assert read_header(file).entries["a"].num_bytes == 0


def test_cut_file_is_marked(tmp_path: Path) -> None:
    file = _write(tmp_path / "a", {"a": _entry("F32", [2], 0, 8)}, b"1234")
    assert read_header(file).is_truncated


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (_entry("F4_X", [2], 0, 8), "tensor a has the unknown dtype 'F4_X'"),
        (_entry("F32", [3], 0, 8), r"tensor a \(F32 \[3\]\) needs 12 bytes"),
        (_entry("F32", [-2], 0, 8), r"tensor a has shape \[-2\]"),
        (_entry("F32", [2], 8, 16), "tensor a starts at byte"),
        ({"dtype": "F32"}, "tensor a is described by"),
        ([], "tensor a is described by"),
    ],
)
def test_bad_entry_is_named(tmp_path: Path, entry: object, message: str) -> None:
    file = _write(tmp_path / "a", {"a": entry}, bytes(16))
    with pytest.raises(CheckpointError, match=message):
        read_header(file)


def test_overlap_is_named(tmp_path: Path) -> None:
    header = {"a": _entry("F32", [2], 0, 8), "b": _entry("F32", [2], 4, 12)}
    with pytest.raises(CheckpointError, match=r"tensor b starts at .* overlap or leave a hole"):
        read_header(_write(tmp_path / "a", header, bytes(12)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 32, "not a safetensors file"),
        ((100).to_bytes(8, "little") + b"{}", "ends inside its header: 2 of 100"),
        ((2).to_bytes(8, "little") + b"{]", "header that is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
    ],
)
def test_bad_header_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "a"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(file)
