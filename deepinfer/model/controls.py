"""Measuring controls: parts of the model put out of action on purpose, to see what needs them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Selections(enum.Enum):
    """What index sources hand to attention: the model's choice, nothing, or any entries."""

    MODEL = "model"
    NONE = "none"
    RANDOM = "random"


class EngramRows(enum.Enum):
    """What Engram layers fetch: the model's rows, or zeros, which inject nothing."""

    MODEL = "model"
    ZERO = "zero"


@dataclass(frozen=True, slots=True)
class Controls:
    """Which parts are replaced; every result of such a model carries the marks.

    Attributes:
        selections: of every index source.
        engram: of every Engram layer.
    """

    selections: Selections = Selections.MODEL
    engram: EngramRows = EngramRows.MODEL

    @property
    def marks(self) -> tuple[str, ...]:
        """One mark for each part that is not the model's own, for example `selections_none`."""
        parts = {"selections": self.selections.value, "engram": self.engram.value}
        return tuple(f"{name}_{value}" for name, value in parts.items() if value != "model")
