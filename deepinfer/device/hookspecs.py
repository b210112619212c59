"""The two hooks of a backend plugin.

A plugin is a module named by an entry point of the group `deepinfer.backends`. It marks its two
functions with `hookimpl` and imports neither torch nor a vendor package at module level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deepinfer.device.backend import Backend
    from deepinfer.device.op import OpChoice

__all__ = [
    "ENTRY_POINT_GROUP",
    "PROJECT_NAME",
    "BackendConfig",
    "Probe",
    "deepinfer_create_backend",
    "deepinfer_plan",
    "deepinfer_probe",
    "hookimpl",
    "hookspec",
]

PROJECT_NAME = "deepinfer"
ENTRY_POINT_GROUP = "deepinfer.backends"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec(firstresult=True)
def deepinfer_probe(options: Mapping[str, object]) -> Probe:  # type: ignore[empty-body]
    """Return whether the backend can run here, or what is missing.

    Args:
        options: `backend.options` it would be created with; empty when nobody chose any. An
            implementation to which they make no difference may leave this parameter out.

    Contract: takes milliseconds, imports no vendor package, starts no process, opens no device.
    """


@hookspec(firstresult=True)
def deepinfer_create_backend(config: BackendConfig) -> Backend:  # type: ignore[empty-body]
    """Return the backend, ready to be asked for its ops and its runtime.

    Args:
        config: name, numerics and options chosen by the user.
    Raises:
        ConfigError: an option is unknown or malformed.
        CapabilityError: the device cannot do what the configuration asks for.
    Contract: called once for each engine, only after a probe that said available.
    """


@hookspec(firstresult=True)
def deepinfer_plan(config: BackendConfig) -> Sequence[OpChoice]:  # type: ignore[empty-body]
    """Return what the backend would use for each op on its device, without that device.

    Optional: a backend that does not implement it can only be asked where it is available.

    Args:
        config: name, numerics and options; options that stand in for the device are ignored.
    """
