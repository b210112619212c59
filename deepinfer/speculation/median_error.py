"""How far a median of few measurements may be off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_PER_DISTANCE = 1.4826 * 1.2533
"""Standard deviation of a normal distribution by its median distance, and the error that a median
has beside a mean."""


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median of normal values, from their median distance to it."""
    median = statistics.median(values)
    distance = statistics.median(abs(value - median) for value in values)
    return _PER_DISTANCE * distance / math.sqrt(len(values))
