"""A random checkpoint that tests may damage, and the means to damage it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.model.config import V41Config
from deepinfer.model.weights.random_init import random_parameters
from deepinfer.model.weights.safetensors_file import encode_header, read_header
from deepinfer.model.weights.shard_index import INDEX_FILE
from deepinfer.model.weights.writer import write_checkpoint

Header = dict[str, tuple[str, tuple[int, ...]]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Hundreds of tiny tensors: handing them to threads costs far more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def checkpoint(tmp_path: Path, small: V41Config) -> Path:
    """A complete random checkpoint of several shards."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, small, random_parameters(small, 1), max_shard_bytes=2**20)
    return folder


@pytest.fixture
def change_index() -> Callable[[Path, Callable[[dict[str, str]], object]], None]:
    """Rewrites the weight map of a checkpoint's index."""

    def change(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
        file = folder / INDEX_FILE
        index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        edit(index["weight_map"])
        file.write_text(json.dumps(index), encoding="utf-8")

    return change


@pytest.fixture
def change_header() -> Callable[[Path, Callable[[Header], object]], None]:
    """Rewrites the header of one shard; its data become zeros of the new sizes."""

    def change(file: Path, edit: Callable[[Header], object]) -> None:
        tensors: Header = {
            name: (entry.dtype, entry.shape) for name, entry in read_header(file).entries.items()
        }
        edit(tensors)
        file.write_bytes(
            encode_header([(name, dtype, shape) for name, (dtype, shape) in tensors.items()])
        )
        with file.open("r+b") as stream:
            stream.truncate(read_header(file).file_bytes)

    return change
