"""Plugin hooks of the backend `cuda_sm100`."""

from __future__ import annotations

from typing import NoReturn

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.errors import CapabilityError
from deepinfer.device.hookspecs import hookimpl
from deepinfer.device.probe import Probe
from deepinfer_cuda_sm100.probe import NO_KERNELS, probe_cuda_sm100


@hookimpl
def deepinfer_probe() -> Probe:
    """Return what this backend misses here; see `deepinfer_cuda_sm100.probe`."""
    return probe_cuda_sm100()


@hookimpl
def deepinfer_create_backend(config: BackendConfig) -> NoReturn:
    """Refuse: there is nothing to create yet.

    Raises:
        CapabilityError: always.
    """
    raise CapabilityError(f"{config.name}: {NO_KERNELS}")
