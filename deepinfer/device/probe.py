"""What a backend says about itself before anything heavy is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SEAM_VERSION = 1
"""Version of the device layer: hooks, op contracts and runtime protocols together.

It rises when a backend written for the older version would no longer be correct.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of looking for one piece that a backend needs.

    Attributes:
        reason: why the piece is missing or unusable and what to do; empty if it is fine.
        device: short description, if the piece is the device.
        versions: versions seen on the way, by package or driver name.
    """

    reason: str = ""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """Answer of the `deepinfer_probe` hook.

    Attributes:
        name: the backend's name, equal to its entry point's name.
        available: whether `deepinfer_create_backend` can be expected to work here.
        reasons: if not available, one sentence for each missing piece, with its remedy.
        device: short description of the device found, or an empty string.
        seam_version: the seam the backend was *written for*, as a literal number. Passing
            `SEAM_VERSION` would make every backend look compatible.
        versions: versions of the packages and drivers the backend uses, as far as they are found.
    """

    name: str
    available: bool
    reasons: tuple[str, ...]
    device: str
    seam_version: int
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an answer that contradicts itself.

        Raises:
            ValueError: available with reasons against it, or unavailable without a reason.
        """
        if self.available == bool(self.reasons):
            raise ValueError(
                f"Probe {self.name!r}: available={self.available} with {len(self.reasons)} reasons "
                "against it; give reasons exactly when the backend is not available"
            )

    @classmethod
    def from_findings(cls, name: str, seam_version: int, findings: Iterable[Finding]) -> Probe:
        """Return the probe that sums up `findings`: available if none of them has a reason.

        Args:
            name: the backend's name.
            seam_version: the seam the backend was written for, as a literal number.
            findings: what was looked for, in the order the reasons are to be read; the first
                device description is taken.
        """
        findings = tuple(findings)
        reasons = tuple(finding.reason for finding in findings if finding.reason)
        return cls(
            name=name,
            available=not reasons,
            reasons=reasons,
            device=next((finding.device for finding in findings if finding.device), ""),
            seam_version=seam_version,
            versions={key: text for finding in findings for key, text in finding.versions.items()},
        )


def find_package(module: str, *, distribution: str, remedy: str) -> Finding:
    """Return whether the top-level package `module` can be imported, without importing it.

    Args:
        module: top-level import name.
        distribution: name under which its version is recorded.
        remedy: how to get it, as the end of a sentence.
    """
    if importlib.util.find_spec(module) is None:
        return Finding(reason=f"the Python package {module} is missing: {remedy}")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown version"  # importable from a plain folder, without metadata
    return Finding(versions={distribution: version})
