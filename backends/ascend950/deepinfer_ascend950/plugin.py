"""Plugin hooks of the backend `ascend950`; a probe imports neither torch nor torch_npu."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.device.hookspecs import hookimpl
from deepinfer.device.probe import Probe
from deepinfer_ascend950.probe import probe_ascend950, probe_emulation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deepinfer.device.backend import Backend
    from deepinfer.device.hookspecs import BackendConfig
    from deepinfer.device.op import OpChoice


@hookimpl
def deepinfer_probe(options: Mapping[str, object]) -> Probe:
    """Return what this backend misses here; with `emulated`, only what the emulation needs."""
    return probe_emulation() if options.get("emulated", False) else probe_ascend950()


@hookimpl
def deepinfer_create_backend(config: BackendConfig) -> Backend:
    """Create the backend on an NPU, or with option `emulated` on the CPU.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
        CapabilityError: the installed torch_npu is not the one the calls were written for.
    """
    from deepinfer_ascend950.backend import Ascend950Backend

    return Ascend950Backend(config)


@hookimpl
def deepinfer_plan(config: BackendConfig) -> Sequence[OpChoice]:
    """Return the choices of the op table, which needs no device.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """
    from deepinfer_ascend950.op_table import plan

    return plan(config)
