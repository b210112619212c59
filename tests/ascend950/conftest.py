"""The emulated ascend950 backend and the reference in both numerics modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer_ascend950.backend import Ascend950Backend
from deepinfer_ascend950.calls import NpuCalls

Emulate = Callable[..., Ascend950Backend]


@pytest.fixture(scope="session")
def emulate() -> Iterator[Emulate]:
    """Makes an emulated backend, with operators called as usual or by `calls`."""
    made: list[Ascend950Backend] = []

    def make(numerics: Numerics, calls: NpuCalls | None = None) -> Ascend950Backend:
        config = BackendConfig("ascend950", numerics, {"emulated": True})
        made.append(Ascend950Backend(config, calls))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture(scope="session")
def references() -> Iterator[Mapping[Numerics, Backend]]:
    """The reference by numerics mode, inline."""
    made = {
        mode: load_backend(BackendConfig("reference", mode, {"runtime": "inline"}))
        for mode in Numerics
    }
    yield made
    for backend in made.values():
        backend.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster without helpers, and helpers that wait for a core are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
