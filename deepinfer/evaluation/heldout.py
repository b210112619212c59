"""The held-out texts, which no training may use."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from deepinfer.device.errors import ConfigError

HELDOUT_FOLDER = Path(__file__).parent / "data" / "heldout"


def heldout_names() -> tuple[str, ...]:
    """Names of the texts, in alphabetical order."""
    return tuple(sorted(path.stem for path in HELDOUT_FOLDER.glob("*.txt")))


@cache
def read_heldout(name: str) -> str:
    """One text.

    Raises:
        ConfigError: there is none of that name.
    """
    path = HELDOUT_FOLDER / f"{name}.txt"
    if not path.is_file():
        raise ConfigError(
            f"held-out text {name!r} is unknown; expected one of {', '.join(heldout_names())}"
        )
    # Bytes are counted, so line ends stay as they are.
    return path.read_bytes().decode("utf-8")
