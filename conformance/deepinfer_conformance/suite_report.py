"""The result of a run: verdict per profile, results, and what is needed to read them later."""

from __future__ import annotations

import datetime
import enum
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer.device.probe import SEAM_VERSION
from deepinfer_conformance.outcome import Outcome, Status
from deepinfer_conformance.suite import CORE

REPORT_VERSION = 1
_PACKAGES = (
    "deepinfer-hal",
    "torch",
    "numpy",
    "triton",
    "deep_gemm",
    "deep_ep",
    "flashinfer-python",
    "torch_npu",
)


class ProfileVerdict(enum.Enum):
    """What a profile's cases say together."""

    PASS = "pass"
    EXPECTED_FAILURES = "expected failures"
    """Nothing unexpected, but not all of it passes."""
    FAIL = "fail"
    ABSENT = "absent"
    """A feature that the backend does not declare."""


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """A finished run.

    Attributes:
        backend: name of the backend under test.
        options: its options.
        device: torch device it computed on.
        labels: what the backend has every report say, for example `emulated`.
        level: quick, default or full.
        query: what was selected; empty for all.
        outcomes: in the order they ran.
        problems: what is wrong with the run itself, for example an unused expected failure.
        environment: interpreter, platform, versions, date.
        seconds: wall time of the run.
    """

    backend: str
    options: Mapping[str, object]
    device: str
    labels: tuple[str, ...]
    level: str
    query: str
    outcomes: tuple[Outcome, ...]
    problems: tuple[str, ...]
    environment: Mapping[str, str]
    seconds: float
    profiles: Mapping[str, ProfileVerdict] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "profiles", dict(_profiles(self.outcomes)))

    @property
    def is_good(self) -> bool:
        """Nothing failed that was not expected to."""
        bad = any(outcome.status.is_bad for outcome in self.outcomes)
        return bool(self.outcomes) and not bad and not self.problems

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """Outcomes that count against the backend, located ones first; without missing ops."""
        bad = [o for o in self.outcomes if o.status.is_bad and o.status is not Status.MISSING]
        return tuple(sorted(bad, key=lambda outcome: not outcome.first_difference))

    @property
    def missing_ops(self) -> tuple[str, ...]:
        """`family/name` of every op that the backend does not have."""
        groups = [o.group for o in self.outcomes if o.status is Status.MISSING]
        return tuple(dict.fromkeys(group.removeprefix("ops/") for group in groups))

    def count(self, status: Status) -> int:
        """Cases that ended so."""
        return sum(outcome.status is status for outcome in self.outcomes)

    def by_group(self) -> dict[str, list[Outcome]]:
        """Outcomes by op or scenario, in order."""
        groups: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault(outcome.group, []).append(outcome)
        return groups

    def repeat_command(self, outcome: Outcome) -> str:
        """The command that runs one case alone."""
        options = "".join(
            f" --set backend.options.{name}={value}" for name, value in self.options.items()
        )
        full = " --full" if self.level == "full" else ""
        command = f"deepinfer conformance --backend {self.backend}{options}{full}"
        return f"{command} '{outcome.case_id}'"

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        return {
            "report_version": REPORT_VERSION,
            "backend": self.backend,
            "options": dict(self.options),
            "device": self.device,
            "labels": list(self.labels),
            "level": self.level,
            "query": self.query,
            "environment": dict(self.environment),
            "seconds": round(self.seconds, 3),
            "profiles": {name: verdict.value for name, verdict in self.profiles.items()},
            "problems": list(self.problems),
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SuiteReport:
        """The inverse of `to_json`."""
        return cls(
            backend=data["backend"],
            options=data["options"],
            device=data["device"],
            labels=tuple(data["labels"]),
            level=data["level"],
            query=data["query"],
            outcomes=tuple(Outcome.from_json(outcome) for outcome in data["outcomes"]),
            problems=tuple(data["problems"]),
            environment=data["environment"],
            seconds=data["seconds"],
        )


def _profiles(outcomes: tuple[Outcome, ...]) -> Iterator[tuple[str, ProfileVerdict]]:
    names = sorted({outcome.profile for outcome in outcomes}, key=lambda name: (name != CORE, name))
    for name in names:
        statuses = {outcome.status for outcome in outcomes if outcome.profile == name}
        if any(status.is_bad for status in statuses):
            yield name, ProfileVerdict.FAIL
        elif Status.EXPECTED_FAILURE in statuses:
            yield name, ProfileVerdict.EXPECTED_FAILURES
        elif statuses == {Status.ABSENT}:
            yield name, ProfileVerdict.ABSENT
        else:
            yield name, ProfileVerdict.PASS


def environment_facts() -> dict[str, str]:
    """Where and with what a run is made."""
    facts = {
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": str(os.cpu_count()),
        "byte_order": sys.byteorder,
        "seam_version": str(SEAM_VERSION),
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts
