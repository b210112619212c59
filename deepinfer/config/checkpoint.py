"""Section `checkpoint`: where the weights come from."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from deepinfer.config.presets import bundled_checkpoint
from deepinfer.config.section import Section


class CheckpointSection(Section):
    """A checkpoint directory, and whether its weights or random ones are used."""

    path: Path | None = Field(
        default=None,
        strict=False,
        description="a checkpoint directory, relative to the current one; null = the bundled one",
    )
    random_weights: bool = Field(
        default=False,
        description="true or false; true takes the checkpoint's structure with random weights",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="a seed for random weights, a whole number from 0 to 2^63 - 1",
    )

    @field_validator("path")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        if path is not None and str(path) in ("", "."):
            raise ValueError("is empty")
        return None if path is None else path.expanduser()

    @property
    def directory(self) -> Path:
        """The directory to read: `path`, or the checkpoint that comes with the project.

        Raises:
            CheckpointError: `path` is not set and the bundled checkpoint is not installed.
        """
        return bundled_checkpoint() if self.path is None else self.path
