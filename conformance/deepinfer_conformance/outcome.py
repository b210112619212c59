"""What became of one case, in a form that travels between processes and into reports."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer_conformance.verdict import Verdict


class Status(enum.Enum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    MISSING = "missing"
    """The backend has no implementation of the op."""
    ERROR = "error"
    """The backend raised something."""
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The process that ran it died."""
    EXPECTED_FAILURE = "expected_failure"
    UNEXPECTED_PASS = "unexpected_pass"
    """Listed as an expected failure, and it passed: the list is out of date."""
    ABSENT = "absent"
    """Belongs to a feature that the backend does not declare."""

    @property
    def is_bad(self) -> bool:
        """Whether it counts against the backend."""
        return self not in (Status.PASSED, Status.EXPECTED_FAILURE, Status.ABSENT)


@dataclass(frozen=True, slots=True)
class Measure:
    """Worst error of one output.

    Attributes:
        output: name of the output, or what was measured.
        error: in the unit of the comparison.
        bound: what is allowed, in the same unit.
        where: the worst place, with both values.
        origin: why the bound is what it is.
        passed: within the bound.
    """

    output: str
    error: float
    bound: float
    where: str
    origin: str
    passed: bool

    @classmethod
    def of(cls, output: str, verdict: Verdict, origin: str) -> Measure:
        """The measure of a verdict."""
        return cls(output, verdict.error, verdict.bound, verdict.where, origin, verdict.passed)

    @property
    def ratio(self) -> float:
        """Error in units of the bound."""
        if self.bound > 0.0:
            return self.error / self.bound
        return 0.0 if self.error == 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case.

    Attributes:
        case_id: stable id, also the query that repeats it.
        profile: `core`, or the feature it proves.
        status: how it ended.
        seconds: wall time.
        measures: worst error of every output.
        message: what went wrong in one line, or the reason of an expected failure.
        first_difference: the first step, layer, op and token that differ, where a scenario
            diverged and the suite could locate it.
        notes: further lines, for example the growth of the error over the layers.
    """

    case_id: str
    profile: str
    status: Status
    seconds: float = 0.0
    measures: tuple[Measure, ...] = ()
    message: str = ""
    first_difference: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def group(self) -> str:
        """The op, the scenario or the feature the case belongs to."""
        name = self.case_id.partition(":")[0]
        return "/".join(name.split("/")[:2]) if name.startswith("features/") else name

    @property
    def worst(self) -> Measure | None:
        """The output nearest to its bound, or farthest beyond."""
        return max(self.measures, key=lambda measure: measure.ratio, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data; infinities become strings, which every JSON reader takes."""
        data = asdict(self)
        data["status"] = self.status.value
        for measure in data["measures"]:
            measure["error"] = _plain(measure["error"])
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The inverse of `to_json`."""
        measures = tuple(
            Measure(**{**measure, "error": float(measure["error"])}) for measure in data["measures"]
        )
        fields = {**data, "status": Status(data["status"]), "measures": measures}
        return cls(**{**fields, "notes": tuple(data["notes"])})


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
