"""Configurations and checkpoints that the model tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.model.config import V41Config

DATA = Path(__file__).resolve().parents[2] / "data"


def _read(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((DATA / name / "config.json").read_text(encoding="utf-8"))
    return raw


@pytest.fixture
def tiny_raw() -> dict[str, Any]:
    """A flat config.json with every mechanism, safe to change."""
    return _read("tiny")


@pytest.fixture
def flash_raw() -> dict[str, Any]:
    """The nested config.json of the released size, safe to change."""
    return _read("flash")


@pytest.fixture(scope="session")
def flash() -> V41Config:
    """The released configuration."""
    return V41Config.from_json(DATA / "flash")


@pytest.fixture(scope="session")
def small() -> V41Config:
    """A configuration with every mechanism whose random checkpoint is written in a moment."""
    return V41Config.from_json(DATA / "golden" / "tiny_a" / "checkpoint")


@pytest.fixture(scope="session", params=["tiny_a", "tiny_b"])
def golden(request: pytest.FixtureRequest) -> Path:
    """Each golden fixture's folder."""
    return DATA / "golden" / str(request.param)
