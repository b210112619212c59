"""Temperatures of a checkpoint: read, missing, or for another drafter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.device.errors import CheckpointError
from deepinfer.speculation.calibration import load_temperatures


def test_temperatures_are_read_in_the_order_of_places(tmp_path: Path) -> None:
    (tmp_path / "sts.json").write_text(json.dumps({"temperatures": [1.5, 2, 0.5]}))
    assert load_temperatures(tmp_path, 3) == [1.5, 2.0, 0.5]


def test_a_checkpoint_may_ship_none(tmp_path: Path) -> None:
    assert load_temperatures(tmp_path, 3) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperatures": [1, 1]}', r"2 temperatures.*blocks of 3.*calibration=false"),
        ('{"temperatures": [1, 1, 0]}', "temperature 2 is 0.0"),
        ('{"temperatures": [1, NaN, 1]}', "temperature 1 is nan"),
        ('{"temperature": [1, 1, 1]}', "no list of numbers"),
        ('{"temperatures": 3}', "no list of numbers"),
        ("[1, 2", "no list of numbers"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "sts.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_temperatures(tmp_path, 3)
