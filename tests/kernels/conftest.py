"""Kernels without a GPU: this process interprets them, others compile them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from deepinfer_kernels import interpreter

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:
    # Triton exists for Linux only; elsewhere the kernels cannot even be interpreted.
    collect_ignore_glob = ["test_*.py"]
else:
    interpreter.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The interpreter runs one program after the other on small blocks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20261130)
