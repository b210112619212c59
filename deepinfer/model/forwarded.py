"""What a step's forward leaves behind."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepinfer.model.layer_state import LayerState
from deepinfer.model.step_batch import StepPlan


class Forwarded(NamedTuple):
    """Logits, and what context injection goes on from when a drafter is beside the model.

    Attributes:
        logits: [L, V] fp32 of the wanted rows.
        state: of the rows that left the last layer, with their taps.
        plan: of the step; its capacity may be larger than the step's own.
    """

    logits: Tensor
    state: LayerState
    plan: StepPlan
