"""How a checkpoint stores its matrices: the `quantization_config` object."""

from __future__ import annotations

import enum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ExpertDtype(enum.Enum):
    """Storage of the routed experts' matrices."""

    FP4 = "fp4"
    FP8 = "fp8"
    BF16 = "bf16"


class QuantizationConfig(BaseModel):
    """The one quantisation scheme of the family: e4m3 in 32x32 tiles, power-of-two scales.

    `expert_dtype` alone varies: packed e2m1 with one scale for 32 inputs (released), e4m3 tiles,
    or plain bf16.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    quant_method: Literal["fp8"] = "fp8"
    activation_scheme: Literal["dynamic"] = "dynamic"
    fmt: Literal["e4m3"] | None = None
    weight_block_size: tuple[Literal[32], Literal[32]]
    scale_fmt: Literal["ue8m0"]
    expert_dtype: ExpertDtype = Field(strict=False)
