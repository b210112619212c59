"""Section `measurement`: parts of the model that are replaced to see what needs them."""

from __future__ import annotations

from pydantic import Field

from deepinfer.config.section import Section
from deepinfer.model.controls import Controls, EngramRows, Selections


class MeasurementSection(Section):
    """A measuring device: any value but `model` makes answers worse on purpose.

    Every result of such a run carries a mark (`selections_none`, ...). `deepinfer eval` sets
    these for its controls.
    """

    selections: Selections = Field(
        default=Selections.MODEL,
        strict=False,
        description="model, none or random: the compressed entries that attention sees",
    )
    engram: EngramRows = Field(
        default=EngramRows.MODEL, strict=False, description="model or zero: the rows of Engram"
    )

    @property
    def controls(self) -> Controls:
        """The same for the model."""
        return Controls(self.selections, self.engram)
