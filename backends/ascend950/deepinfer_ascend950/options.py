"""`backend.options` of ascend950."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from deepinfer.device.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """What a user can choose.

    Attributes:
        emulated: compute on the CPU through the emulation of the operators' documentation.
            Nothing then runs on an NPU; results are checks of the calls, not of the device.
        device_index: which NPU.
    """

    emulated: bool = False
    device_index: int = 0


def parse_options(options: Mapping[str, object]) -> Options:
    """Options from the configuration.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """
    known = {field.name for field in fields(Options)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"backend.options.{unknown[0]} is unknown to ascend950; it has {sorted(known)}"
        )
    emulated = options.get("emulated", False)
    if not isinstance(emulated, bool):
        raise ConfigError(f"backend.options.emulated is {emulated!r}; expected true or false")
    index = options.get("device_index", 0)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ConfigError(
            f"backend.options.device_index is {index!r}; expected the number of an NPU, from 0"
        )
    return Options(emulated=emulated, device_index=index)
