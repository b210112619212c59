"""Measuring cost tables: dummy steps replayed on the device that will run the real ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from deepinfer.speculation.cost_tables import CostTables

_NUM_REPLAYS = 5
_BUDGET_US = 1e6
"""A step is replayed no more when its replays have taken this long; a slow device is also one
whose times scatter less."""

Progress = Callable[[str, int, int], None]
"""Told what is measured next, how many points are done and how many there are."""


class StepTimer(Protocol):
    """Runs one dummy step and says how long the device took; its first run may be slow."""

    @property
    def tiers(self) -> tuple[int, ...]:
        """Row counts that steps are padded to, ascending; empty: none."""
        ...

    def draft_us(self, num_requests: int) -> float:
        """Microseconds of one draft pass."""
        ...

    def verify_us(self, num_rows: int) -> float:
        """Microseconds of one target step with sampling and context injection."""
        ...


def measure_costs(
    timer: StepTimer,
    *,
    max_num_seqs: int,
    max_rows: int,
    progress: Progress | None = None,
) -> CostTables:
    """Time draft passes and verifications.

    Args:
        timer: of the worker.
        max_num_seqs: most requests of a step.
        max_rows: most rows of a step.
        progress: told before each point.

    Returns:
        Medians of up to five replays, after one that warms up. Tiers are measured where they are,
        and beyond the last, as far as steps go, at 1.5, 2, 3, 4, ... times it.
    """
    tiers = tuple(tier for tier in timer.tiers if tier <= max_rows)
    requests, rows = list(_spread(1, max_num_seqs)), _rows(tiers, max_rows)
    num_points = len(requests) + len(rows)
    spreads: list[float] = []

    def point(number: int, what: str, run: Callable[[], float]) -> float:
        if progress is not None:
            progress(what, number, num_points)
        median_us, spread = _median(run)
        spreads.append(spread)
        return median_us

    draft_us = {
        count: point(index, f"draft, {count} requests", partial(timer.draft_us, count))
        for index, count in enumerate(requests)
    }
    verify_us = {
        count: point(
            len(requests) + index, f"verify, {count} rows", partial(timer.verify_us, count)
        )
        for index, count in enumerate(rows)
    }
    if progress is not None:
        progress("done", num_points, num_points)
    return CostTables(draft_us, verify_us, tiers, statistics.median(spreads))


def _median(run: Callable[[], float]) -> tuple[float, float]:
    """Median of the replays, and their median distance to it as a share."""
    run()
    times: list[float] = []
    while len(times) < _NUM_REPLAYS and (not times or sum(times) < _BUDGET_US):
        times.append(run())
    median_us = statistics.median(times)
    return median_us, statistics.median(abs(time - median_us) for time in times) / median_us


def _rows(tiers: tuple[int, ...], max_rows: int) -> list[int]:
    if not tiers:
        return list(_spread(1, max_rows))
    return [*tiers, *(count for count in _spread(tiers[-1], max_rows) if count > tiers[-1])]


def _spread(first: int, last: int) -> Iterator[int]:
    """first, 1.5 first, 2 first, 3 first, ... and last."""
    count = first
    while count < last:
        yield count
        if count + count // 2 < last and count > 1:
            yield count + count // 2
        count *= 2
    yield last
