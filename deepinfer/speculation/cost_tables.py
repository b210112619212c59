"""What a round costs: time of a draft pass by requests, of a verification by rows.

A step is run with the rows of its graph tier, so between tiers the time of a verification is a
staircase: the padding is paid for. Beyond the largest tier, or without tiers, it is a line through
the measured points. Measured times are made monotone, because a planner that sees noise as a
cheaper step would chase it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from deepinfer.device.errors import ConfigError

Times = npt.NDArray[np.float64]
_LEAST_US = 1e-3


@dataclass(frozen=True)
class CostTables:
    """Measured times of draft passes and verifications.

    Attributes:
        draft_us: microseconds of a draft pass, by requests.
        verify_us: microseconds of a target step, by rows.
        tiers: row counts that steps are padded to, ascending; each one is a key of `verify_us`.
            Empty: a step runs with the rows it has.
        relative_noise: standard error of a time, as a share of it.
    """

    draft_us: Mapping[int, float]
    verify_us: Mapping[int, float]
    tiers: tuple[int, ...] = ()
    relative_noise: float = 0.0

    def __post_init__(self) -> None:
        """Refuse tables that no time can be read from.

        Raises:
            ConfigError: a table is empty, a count or a time is not above 0, a tier has no time.
        """
        for name, table in (("draft_us", self.draft_us), ("verify_us", self.verify_us)):
            if not table:
                raise ConfigError(f"cost table {name} is empty; measure the costs again")
            for count, time_us in table.items():
                if count < 1 or not 0.0 < time_us < float("inf"):
                    raise ConfigError(
                        f"cost table {name} says {time_us} us for {count}; expected counts from 1 "
                        "and finite times above 0; measure the costs again"
                    )
        missing = [tier for tier in self.tiers if tier not in self.verify_us]
        if missing or list(self.tiers) != sorted(set(self.tiers)):
            raise ConfigError(
                f"cost table tiers {list(self.tiers)} are not ascending row counts of verify_us "
                f"(no time for {missing}); measure the costs again"
            )

    @cached_property
    def _points(self) -> tuple[list[int], Times]:
        rows = sorted(self.verify_us)
        return rows, monotone([self.verify_us[count] for count in rows])

    def verify_times(self, max_rows: int) -> Times:
        """[max_rows + 1] microseconds of a target step by its rows; entry 0 is 0."""
        rows, times = self._points
        wanted = np.arange(1, max_rows + 1, dtype=np.float64)
        last_tier = self.tiers[-1] if self.tiers else 0
        above = [index for index, count in enumerate(rows) if count > last_tier]
        if above:
            result = _line([rows[index] for index in above], times[above], wanted)
        else:
            # Nothing was measured beyond the tiers: their last slope goes on.
            result = _line(rows, times, wanted)
        if self.tiers:
            tier_times = np.array([times[rows.index(tier)] for tier in self.tiers])
            tier = np.searchsorted(self.tiers, wanted)
            inside = tier < len(self.tiers)
            padded = tier_times[np.minimum(tier, len(self.tiers) - 1)]
            result = np.where(inside, padded, np.maximum(result, tier_times[-1]))
        return np.concatenate(([0.0], np.maximum.accumulate(result)))

    def draft_times(self, max_requests: int) -> Times:
        """[max_requests + 1] microseconds of a draft pass by its requests; entry 0 is 0."""
        counts = sorted(self.draft_us)
        times = monotone([self.draft_us[count] for count in counts])
        wanted = np.arange(1, max_requests + 1, dtype=np.float64)
        line = np.maximum.accumulate(_line(counts, times, wanted))
        return np.concatenate(([0.0], line))


def monotone(times: Sequence[float]) -> Times:
    """The non-decreasing sequence with the smallest squared distance to `times`.

    Neighbours in the wrong order share their mean, so that one slow outlier does not lift all
    that come after it.
    """
    groups: list[list[float]] = []  # mean and length
    for time in times:
        groups.append([time, 1.0])
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            mean, length = groups.pop()
            total = groups[-1][1] + length
            groups[-1][0] += (mean - groups[-1][0]) * length / total
            groups[-1][1] = total
    return np.concatenate([np.full(int(length), mean) for mean, length in groups])


def _line(counts: Sequence[int], times: Times, wanted: Times) -> Times:
    """Linear between points, with the first and last slope beyond them; never below 0."""
    if len(counts) == 1:
        return np.full_like(wanted, times[0])
    x = np.asarray(counts, dtype=np.float64)
    first = (times[1] - times[0]) / (x[1] - x[0])
    last = (times[-1] - times[-2]) / (x[-1] - x[-2])
    result = np.interp(wanted, x, times)
    result = np.where(wanted < x[0], times[0] + first * (wanted - x[0]), result)
    result = np.where(wanted > x[-1], times[-1] + last * (wanted - x[-1]), result)
    # A steep first slope must not lead below 0.
    bounded: Times = np.maximum(result, min(times[0], _LEAST_US))
    return bounded
