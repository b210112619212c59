"""Section `backend`: which device layer runs the model."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from deepinfer.config.section import Section


class BackendSection(Section):
    """The backend by name, and options that only this backend understands and checks."""

    name: str = Field(
        default="reference",
        min_length=1,
        description="the name of an installed backend (`deepinfer backends` lists them)",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="a mapping of options that the chosen backend documents",
    )
