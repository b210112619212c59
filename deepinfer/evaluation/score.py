"""A measured figure with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the result.

    Attributes:
        task: `bpb` or a task's name.
        group: text, distance, length, ... within the task.
        control: mark of the control it was measured under, or "" for the model as it is.
        metric: `bits_per_byte` (lower is better) or a share of right answers, 0 to 1.
        num_items: windows or questions it is made of.
        value: the figure.
        standard_error: of the figure, in its own unit; None where one window gives none.
    """

    task: str
    group: str
    control: str
    metric: str
    num_items: int
    value: float
    standard_error: float | None

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def share(successes: Sequence[bool]) -> tuple[float, float]:
    """Share of successes and its standard error.

    The error is that of the share with half a success and half a failure added, so that it does
    not vanish where every answer is right (or wrong): 64 of 64 gives 1.000 +- 0.011.
    """
    num = len(successes)
    smoothed = (sum(successes) + 0.5) / (num + 1)
    return sum(successes) / num, math.sqrt(smoothed * (1.0 - smoothed) / num)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float | None]:
    """Sum over sum, and its standard error over the parts (linearised); None for one part."""
    num = len(numerators)
    total = math.fsum(denominators)
    value = math.fsum(numerators) / total
    if num < 2:
        return value, None
    squares = math.fsum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    return value, math.sqrt(squares * num / (num - 1)) / total
