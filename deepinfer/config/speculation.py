"""Section `speculation`: drafting tokens ahead and verifying them."""

from __future__ import annotations

import enum

from pydantic import Field

from deepinfer.config.section import Section


class SpeculationMode(enum.Enum):
    """How many drafts a step verifies: none, always the same number, or what pays."""

    OFF = "off"
    FIXED = "fixed"
    DYNAMIC = "dynamic"


class SpeculationSection(Section):
    """Speculative decoding; it never changes the distribution of outputs."""

    mode: SpeculationMode = Field(
        default=SpeculationMode.OFF, strict=False, description="off, fixed or dynamic"
    )
    max_drafts: int = Field(
        default=0, ge=0, description="the most draft tokens of a sequence in a step, from 0"
    )
