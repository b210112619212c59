"""How values are written in configuration files, for messages."""

from __future__ import annotations

import enum

_MAX_LEN = 80


def spell(value: object) -> str:
    """Return a value as it is written in a configuration file, cut to a readable length."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_LEN else text[: _MAX_LEN - 3] + "..."
