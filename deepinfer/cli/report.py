"""The JSON report that `--json FILE` writes."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from deepinfer.device.errors import ConfigError, ContractError

_DISTRIBUTIONS = (
    "deepinfer-hal",
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "pydantic",
    "pluggy",
)
REPORT_VERSION = 1


def write_json(
    path: Path | str,
    command: str,
    figures: Mapping[str, Any],
    *,
    config: BaseModel | None = None,
) -> None:
    """Write a report; the file is complete or not there at all.

    Args:
        path: the file to write or replace.
        command: the command that measured, for example "batch run".
        figures: what it found; finite numbers, text, lists and mappings.
        config: the resolved configuration, None when the command has none.
    Raises:
        ContractError: a figure is not a finite number or not of a JSON type.
        ConfigError: the file cannot be written.
    """
    report = {
        "report_version": REPORT_VERSION,
        "command": command,
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": _environment(),
        "versions": _versions(),
        "config": None if config is None else config.model_dump(mode="json"),
        "figures": figures,
    }
    try:
        text = json.dumps(report, allow_nan=False, ensure_ascii=False, indent=2)
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"report of {command}: {error}; expected finite numbers, text, lists and mappings"
        ) from error
    _replace(Path(path), text + "\n")


def _environment() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "byte_order": sys.byteorder,
    }


def _versions() -> dict[str, str | None]:
    """Return the installed version of each distribution, None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _replace(path: Path, text: str) -> None:
    """Write beside the target first, so that a reader never sees half a report."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"{path}: the report cannot be written ({error.strerror}); name a file in a folder "
            "that exists and is writable"
        ) from error


def _umask() -> int:
    """Return the mask for new files; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
