"""The part of the configuration that a backend sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfer.device.numerics import Numerics


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """What `deepinfer_create_backend` is given.

    Attributes:
        name: entry point name of the chosen backend.
        numerics: rounding mode that its ops have to follow.
        options: `backend.options` of the configuration. Their names belong to the backend, which
            refuses those it does not know.
    """

    name: str
    numerics: Numerics
    options: Mapping[str, object] = field(default_factory=dict)
