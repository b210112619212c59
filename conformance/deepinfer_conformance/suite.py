"""All cases of the suite, by level: ids, profiles, and how each is run."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepinfer_conformance.bench import Bench
from deepinfer_conformance.cases import matches
from deepinfer_conformance.outcome import Outcome

CORE = "core"


class Level(enum.IntEnum):
    """How much is run; each level contains the one before."""

    QUICK = 0
    """One call of every op around its control, the shortest scenarios."""
    DEFAULT = 1
    """Every sample, every scenario on the tiny checkpoints."""
    FULL = 2
    """Shapes of the published models too, sized to fit the device."""


@dataclass(frozen=True, slots=True)
class SuiteCase:
    """One case.

    Attributes:
        case_id: stable and unique; a prefix of it is a query.
        profile: `core`, or the feature that a backend must declare for it to count.
        level: lowest level that runs it.
        run: runs it; exceptions of the backend pass through.
    """

    case_id: str
    profile: str
    level: Level
    run: Callable[[Bench], Outcome]


def suite_cases(level: Level = Level.FULL, query: str = "") -> tuple[SuiteCase, ...]:
    """Cases of a level that a query selects, in the order they run.

    Args:
        level: all cases up to it.
        query: prefix or pattern of ids; empty takes all. A query that names a case beyond the
            level selects nothing of it.
    """
    return tuple(
        case for case in _all_cases() if case.level <= level and matches(case.case_id, query)
    )


def _all_cases() -> Iterator[SuiteCase]:
    # Imported here: these modules make SuiteCases.
    from deepinfer_conformance import feature_cases, op_suite, scenarios

    yield from op_suite.suite_cases()
    yield from feature_cases.suite_cases()
    yield from scenarios.suite_cases()


def time_limit_s(case: SuiteCase) -> float:
    """Seconds after which a case is taken for hung; generous, the machine may be busy."""
    return 600.0 if case.case_id.startswith("scenarios/") else 120.0
