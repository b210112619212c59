"""Failures that a backend's authors know of: a file in the backend's own package.

`expected_failures.yaml` beside the plugin module holds a list of entries, each with `cases`, a
pattern of case ids, and `reason`. An entry that matches nothing, or whose case passes, is an
error: the list says what is true today.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass, replace

import yaml

from deepinfer.device.errors import ConfigError
from deepinfer.device.registry import list_backends
from deepinfer_conformance.cases import matches
from deepinfer_conformance.outcome import Outcome, Status

FILE_NAME = "expected_failures.yaml"
_FORM = "expected a list of entries with `cases` (a pattern of case ids) and `reason`"


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """One entry of the file."""

    cases: str
    reason: str


def expected_failures(backend: str) -> tuple[ExpectedFailure, ...]:
    """Entries of the backend's file; none when it has no file.

    Raises:
        ConfigError: the file is malformed.
    """
    module = next((info.module for info in list_backends() if info.name == backend), "")
    package = module.rpartition(".")[0] or module
    if not package:
        return ()
    file = importlib.resources.files(package) / FILE_NAME
    return parse(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else ()


def parse(text: str, origin: str) -> tuple[ExpectedFailure, ...]:
    """Entries of a file's text.

    Args:
        text: YAML.
        origin: where it comes from, for messages.
    Raises:
        ConfigError: it is not a list of entries, or a reason is missing.
    """
    try:
        entries = yaml.safe_load(text) or []
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not YAML: {error}; {_FORM}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{origin}: holds a {type(entries).__name__}; {_FORM}")
    found = []
    for number, entry in enumerate(entries, 1):
        fields = entry if isinstance(entry, dict) else {}
        if set(fields) != {"cases", "reason"} or not all(fields.values()):
            raise ConfigError(f"{origin}: entry {number} is {entry!r}; {_FORM}")
        found.append(ExpectedFailure(str(fields["cases"]), str(fields["reason"])))
    return tuple(found)


def judged(outcome: Outcome, entries: tuple[ExpectedFailure, ...]) -> Outcome:
    """The outcome in the light of what was expected."""
    entry = next((entry for entry in entries if matches(outcome.case_id, entry.cases)), None)
    if entry is None:
        return outcome
    if outcome.status is Status.PASSED:
        words = f"expected to fail ({entry.reason}), but it passed; remove the entry"
        return replace(outcome, status=Status.UNEXPECTED_PASS, message=words)
    if outcome.status.is_bad:
        words = f"{entry.reason} [{outcome.message}]"
        return replace(outcome, status=Status.EXPECTED_FAILURE, message=words)
    return outcome


def unused(
    entries: tuple[ExpectedFailure, ...], case_ids: tuple[str, ...]
) -> tuple[ExpectedFailure, ...]:
    """Entries that match no case."""
    return tuple(
        entry for entry in entries if not any(matches(case, entry.cases) for case in case_ids)
    )
