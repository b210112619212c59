"""Section `speculation`: drafting tokens ahead and verifying them."""

from __future__ import annotations

import enum
from pathlib import Path

from pydantic import Field, field_validator

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
    max_drafts: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="the most draft tokens of a sequence in a step, from 1 to 8; null = as many "
        "as the checkpoint's drafter gives",
    )
    cost_table: Path | None = Field(
        default=None,
        strict=False,
        description="a JSON file with the measured times of a round, which is read if it exists "
        "and written if not; null = dynamic measures at every start",
    )
    calibration: bool | None = Field(
        default=None,
        description="true, false or null: whether confidences are scaled by the checkpoint's "
        "sts.json; null = if it has one",
    )

    @field_validator("cost_table")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        if path is not None and str(path) in ("", "."):
            raise ValueError("is empty")
        return None if path is None else path.expanduser()

    @property
    def is_on(self) -> bool:
        """Whether a drafter is needed."""
        return self.mode is not SpeculationMode.OFF
