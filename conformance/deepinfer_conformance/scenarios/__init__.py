"""Whole generations on tiny checkpoints, through the public API."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_conformance.scenarios import against_itself, against_reference
from deepinfer_conformance.suite import SuiteCase


def suite_cases() -> Iterator[SuiteCase]:
    """Scenarios beside the reference, then those a backend plays against itself."""
    yield from against_reference.suite_cases()
    yield from against_itself.suite_cases()
