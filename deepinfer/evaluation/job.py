"""Something to measure: prompts for an engine, and what their results say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.evaluation.score import Score
from deepinfer.model.controls import Controls


class Job(Protocol):
    """One task under one control.

    Attributes:
        task: its name.
        controls: what the engine that answers has out of action.
        prompts: token ids.
        params: one for each prompt.
    """

    task: str
    controls: Controls
    prompts: list[list[int]]
    params: list[SamplingParams]

    def scores(self, results: Sequence[RequestOutput]) -> list[Score]:
        """Figures of the results, which stand in the order of the prompts."""
        ...

    def answers(self, results: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """What was answered, item by item, as JSON objects."""
        ...


def control_name(controls: Controls) -> str:
    """Name of the control, "" for the model as it is."""
    return "+".join(controls.marks)
