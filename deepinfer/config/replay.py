"""Section `replay`: how much of a prompt the decoder half of the model runs."""

from __future__ import annotations

import enum

from pydantic import Field

from deepinfer.config.section import Section


class ReplayMode(enum.Enum):
    """EXACT runs every layer on the whole prompt; BOUNDED only the tail in the decoder half."""

    EXACT = "exact"
    BOUNDED = "bounded"


class ReplaySection(Section):
    """Bounded replay. Its kept tail must cover the model's window, which the model checks."""

    mode: ReplayMode = Field(default=ReplayMode.EXACT, strict=False, description="exact or bounded")
    keep_tokens: int = Field(
        default=140,
        ge=1,
        description="the last prompt tokens that the decoder half runs in mode bounded, from 1",
    )
