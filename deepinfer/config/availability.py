"""Settings whose names are fixed already, but whose feature this version does not have.

This is the only place that refuses them. A feature that arrives deletes its line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.config.origins import origin_clause
from deepinfer.config.spelling import spell
from deepinfer.device.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from deepinfer.config.origins import Origins


@dataclass(frozen=True, slots=True)
class Limit:
    """A field of which this version supports only some of the valid values."""

    path: str
    supported: tuple[object, ...]
    missing_feature: str


LIMITS = (Limit("deploy", ("single",), "running on several ranks"),)


def check_available(config: BaseModel, origins: Origins) -> None:
    """Refuse a configuration that asks for a feature this version does not have.

    Args:
        config: a valid EngineConfig.
        origins: where each value was set, for the message.
    Raises:
        ConfigError: a field holds a valid value that is not available in this version.
    """
    for limit in LIMITS:
        value: object = config
        for name in limit.path.split("."):
            value = getattr(value, name)
        if value not in limit.supported:
            supported = " or ".join(spell(choice) for choice in limit.supported)
            raise ConfigError(
                f"{limit.path} = {spell(value)}{origin_clause(origins, limit.path)} is not "
                "available in this version: "
                f"{limit.missing_feature} has not been built yet; expected {supported}; set "
                f"{limit.path}={supported} or leave it out"
            )
