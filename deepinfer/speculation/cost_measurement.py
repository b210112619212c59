"""Measuring cost tables: dummy steps replayed on the device that will run the real ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.median_error import median_error

_NUM_REPLAYS = 5
_BUDGET_US = 30e6
"""No further replay of all points is begun when they have taken this long."""

Progress = Callable[[str, int, int], None]
"""Told what is timed next, how many passes are done and how many there are."""


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
        progress: told before each pass, and at the end.

    Returns:
        Medians of up to five replays, after one that warms up. Tiers are measured where they are,
        and beyond the last, as far as steps go, at 1.5, 2, 3, 4, ... times it.

    All points are replayed one after another before the next replay, so that a machine that
    slows down meanwhile does so for all of them.
    """
    tiers = tuple(tier for tier in timer.tiers if tier <= max_rows)
    points = [
        *(_Point("draft", count, timer.draft_us) for count in _spread(1, max_num_seqs)),
        *(_Point("verify", count, timer.verify_us) for count in _rows(tiers, max_rows)),
    ]
    report = progress or (lambda what, done, total: None)
    total = len(points) * (1 + _NUM_REPLAYS)
    for number, point in enumerate(points):
        report(f"first {point.name}", number, total)
        point.run(point.count)
    done = len(points)
    for replay in range(_NUM_REPLAYS):
        if replay > 0 and sum(sum(point.times) for point in points) > _BUDGET_US:
            break
        for point in points:
            report(point.name, done, total)
            point.times.append(point.run(point.count))
            done += 1
    report("done", done, done)
    return CostTables(
        {point.count: point.median_us for point in points if point.what == "draft"},
        {point.count: point.median_us for point in points if point.what == "verify"},
        tiers,
        statistics.median(point.error for point in points),
    )


@dataclass(slots=True)
class _Point:
    """A pass that is timed, and its times so far."""

    what: str
    count: int
    run: Callable[[int], float]
    times: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.what} of {self.count} {'requests' if self.what == 'draft' else 'rows'}"

    @property
    def median_us(self) -> float:
        return statistics.median(self.times)

    @property
    def error(self) -> float:
        """Standard error of the median as a share of it."""
        return median_error(self.times) / self.median_us


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
