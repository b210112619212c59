"""The reference backend in both numerics modes, made once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer_reference.backend import ReferenceBackend


@pytest.fixture(scope="session")
def backends() -> Iterator[dict[Numerics, Backend]]:
    """The reference by numerics mode, running inline."""
    made: dict[Numerics, Backend] = {
        mode: ReferenceBackend(BackendConfig("reference", mode, {"runtime": "inline"}))
        for mode in Numerics
    }
    yield made
    for backend in made.values():
        backend.close()
