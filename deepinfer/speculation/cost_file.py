"""Cost tables in a file, with the machine and the configuration that they were measured for."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path

from deepinfer.device.errors import ConfigError
from deepinfer.speculation.cost_tables import CostTables

FORMAT_VERSION = 1
Facts = Mapping[str, str | int]
"""What the times depend on: device, backend, checkpoint, numerics, limits, versions."""


def save_costs(path: Path, costs: CostTables, facts: Facts) -> None:
    """Write tables and facts; the file is complete or the old one stays.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "facts": dict(facts),
        "tiers": list(costs.tiers),
        "relative_noise": costs.relative_noise,
        "draft_us": {str(count): costs.draft_us[count] for count in sorted(costs.draft_us)},
        "verify_us": {str(count): costs.verify_us[count] for count in sorted(costs.verify_us)},
    }
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cost tables cannot be written ({error.strerror}); set "
            "speculation.cost_table to a file in a folder that exists and is writable"
        ) from error


def load_costs(path: Path, facts: Facts) -> CostTables:
    """Read tables that were measured for the same machine and configuration.

    Args:
        path: a file of `save_costs`.
        facts: what holds here.
    Raises:
        ConfigError: the file is not of this kind, or one of its facts differs.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, saved = content["format_version"], dict(content["facts"])
        costs = CostTables(
            {int(count): float(value) for count, value in content["draft_us"].items()},
            {int(count): float(value) for count, value in content["verify_us"].items()},
            tuple(int(tier) for tier in content["tiers"]),
            float(content["relative_noise"]),
        )
    except OSError as error:
        raise ConfigError(
            f"cost tables {path} cannot be read ({error.strerror}); correct "
            "speculation.cost_table or leave it out"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no cost tables ({type(error).__name__}: {error}); remove it, so that "
            "they are measured again"
        ) from error
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format_version {version}, this version reads {FORMAT_VERSION}; remove "
            "it, so that the costs are measured again"
        )
    differing = [
        f"{name} is {facts.get(name)!r} here and {saved.get(name)!r} there"
        for name in sorted(facts.keys() | saved.keys())
        if facts.get(name) != saved.get(name)
    ]
    if differing:
        raise ConfigError(
            f"cost tables {path} were measured for something else: {'; '.join(differing)}. Name "
            "another file in speculation.cost_table, or remove this one, so that the costs are "
            "measured again"
        )
    return costs
