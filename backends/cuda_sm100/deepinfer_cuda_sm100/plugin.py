"""Plugin hooks of the backend `cuda_sm100`; nothing heavy is imported before it is created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.errors import CapabilityError
from deepinfer.device.hookspecs import hookimpl
from deepinfer.device.probe import Probe
from deepinfer_cuda_sm100.options import CudaOptions
from deepinfer_cuda_sm100.probe import probe_cuda_sm100, probe_interpreter

if TYPE_CHECKING:
    from deepinfer.device.backend import Backend


@hookimpl
def deepinfer_probe(options: Mapping[str, object]) -> Probe:
    """Return what this backend misses here; with `interpret` it needs Triton alone."""
    if options.get("interpret") is True:
        return probe_interpreter()
    return probe_cuda_sm100()


@hookimpl
def deepinfer_create_backend(config: BackendConfig) -> Backend:
    """Create the backend.

    Raises:
        ConfigError: an option is unknown or malformed.
        CapabilityError: Triton cannot interpret in this process, or there is no such device.
    """
    options = CudaOptions.from_mapping(config.options)
    if options.interpret:
        from deepinfer_kernels import interpreter

        try:
            interpreter.enable()
        except RuntimeError as error:
            raise CapabilityError(f"backend.options.interpret: {error}") from error
    from deepinfer_cuda_sm100.backend import CudaBackend

    return CudaBackend(config, options)
