"""Which implementation a backend chose for each op, and why."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpChoice
from deepinfer.device.ops import load_all
from deepinfer.device.registry import load_backend, plan_backend


def explain_backend(name: str, options: Mapping[str, object]) -> list[OpChoice]:
    """One choice per declared op of the backend that runs here, in order of family and name.

    Args:
        name: entry point name of the backend.
        options: its `backend.options`.
    Raises:
        ConfigError: unknown backend or option.
        CapabilityError: the backend is not available here.
    """
    load_all()
    backend = load_backend(
        BackendConfig(name=name, numerics=Numerics.NORMATIVE, options=dict(options))
    )
    try:
        return list(backend.ops.explain())
    finally:
        backend.close()


def explain_assumed(name: str, options: Mapping[str, object]) -> list[OpChoice]:
    """One choice per declared op, as the backend would make it on its own device.

    Args:
        name: entry point name of the backend; it need not be available here.
        options: its `backend.options`.
    Raises:
        ConfigError: unknown backend or option.
        CapabilityError: the backend cannot tell without its device.
    """
    load_all()
    return list(plan_backend(BackendConfig(name, Numerics.NORMATIVE, dict(options))))
