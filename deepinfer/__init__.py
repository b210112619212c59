"""DeepInfer: offline inference for the DeepSeek-V4.1 family on exchangeable backends.

Names are loaded when they are first used, so that importing the package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.api import LLM as LLM
    from deepinfer.config import EngineConfig as EngineConfig
    from deepinfer.engine.outputs import RequestOutput as RequestOutput
    from deepinfer.engine.sampling_params import SamplingParams as SamplingParams

    __version__: str

_EXPORTS = {
    "LLM": "deepinfer.api",
    "EngineConfig": "deepinfer.config",
    "RequestOutput": "deepinfer.engine.outputs",
    "SamplingParams": "deepinfer.engine.sampling_params",
}
__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  (a module, a class or the version)
    if name == "__version__":
        return _find_version()
    if name not in _EXPORTS:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _find_version() -> str:
    """Return the version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("deepinfer-hal")
    except PackageNotFoundError:
        return "0+not-installed"  # a checkout on the path: nothing states its version
