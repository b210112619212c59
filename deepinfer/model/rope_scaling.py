"""YaRN parameters: the `rope_scaling` object of the layers that read a compressed cache."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RopeScaling(BaseModel):
    """YaRN with magnitude factor 1, as the family uses it.

    `original_max_position_embeddings` is in tokens, the betas in rotations over that length.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rope_type: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1.0, allow_inf_nan=False)
    beta_fast: float = Field(gt=0.0, allow_inf_nan=False)
    beta_slow: float = Field(gt=0.0, allow_inf_nan=False)
    original_max_position_embeddings: int = Field(gt=0)
