"""Configurations of the benchmark tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.model.config import V41Config

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden"


@pytest.fixture(scope="session")
def small() -> V41Config:
    """A configuration with every mechanism."""
    return V41Config.from_json(GOLDEN / "tiny_a" / "checkpoint")
