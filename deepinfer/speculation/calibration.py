"""Temperatures that a checkpoint ships for its confidence head."""

from __future__ import annotations

import json
from pathlib import Path

from deepinfer.device.errors import CheckpointError

CALIBRATION_FILE = "sts.json"


def load_temperatures(checkpoint: Path, block_size: int) -> list[float] | None:
    """The temperatures of sequential temperature scaling, one for each place in a block.

    Args:
        checkpoint: folder of the checkpoint.
        block_size: dspark_block_size of the drafter.

    Returns:
        For `Drafter.calibrate`; None when the checkpoint ships none.

    Raises:
        CheckpointError: the file cannot be read, or was fitted to a drafter of another block size.
    """
    path = checkpoint / CALIBRATION_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)["temperatures"]
        temperatures = [float(value) for value in values]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} has no list of numbers `temperatures` ({type(error).__name__}: {error}); "
            "fit it again or set speculation.calibration=false"
        ) from error
    if len(temperatures) != block_size:
        raise CheckpointError(
            f"{path} has {len(temperatures)} temperatures, but the drafter has blocks of "
            f"{block_size} (dspark_block_size); fit it to this drafter or set "
            "speculation.calibration=false"
        )
    for place, value in enumerate(temperatures):
        if not 0.0 < value < float("inf"):
            raise CheckpointError(
                f"{path}: temperature {place} is {value}; expected finite numbers above 0; fit it "
                "again or set speculation.calibration=false"
            )
    return temperatures
