"""Plugin hooks of the reference backend; torch is imported only when the backend is created."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

from deepinfer.device.hookspecs import hookimpl
from deepinfer.device.probe import Probe

if TYPE_CHECKING:
    from deepinfer.device.backend import Backend
    from deepinfer.device.hookspecs import BackendConfig


@hookimpl
def deepinfer_probe() -> Probe:
    """The reference runs wherever torch does; only torch's version is looked up."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Probe(
            name="reference",
            available=False,
            reasons=("torch is not installed; pip install 'torch>=2.11'",),
            device="",
            seam_version=1,
        )
    return Probe(
        name="reference",
        available=True,
        reasons=(),
        device=f"CPU ({platform.machine()})",
        seam_version=1,
        versions={"torch": version},
    )


@hookimpl
def deepinfer_create_backend(config: BackendConfig) -> Backend:
    """Create the reference backend; option `runtime` is thread, inline or adversarial."""
    from deepinfer_reference.backend import ReferenceBackend

    return ReferenceBackend(config)
