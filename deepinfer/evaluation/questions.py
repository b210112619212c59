"""Tasks whose answers are generated greedily and compared with the right ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.evaluation.items import Item, read_items
from deepinfer.evaluation.job import control_name
from deepinfer.evaluation.score import Score, share
from deepinfer.model.controls import Controls
from deepinfer.text.tokenizer import TextTokenizer

# Nearer than this, the window of small checkpoints still holds what is asked.
MIN_CONTROL_DISTANCE = 48


class Questions:
    """The items of one task."""

    def __init__(
        self,
        task: str,
        tokenizer: TextTokenizer,
        *,
        controls: Controls,
        limit: int | None = None,
    ) -> None:
        """Read the items.

        Args:
            task: a name of `items.task_names`.
            tokenizer: of the checkpoint.
            controls: what the engine has out of action; recall without the model's selections
                leaves out distances that the window covers.
            limit: most items of a group; None: all.
        """
        self.task, self.controls = task, controls
        self._items = [
            item
            for item in read_items(task, tokenizer, limit=limit)
            if not (task == "recall" and controls.marks) or int(item.group) >= MIN_CONTROL_DISTANCE
        ]
        self.prompts = [item.prompt for item in self._items]
        self.params = [
            SamplingParams(temperature=0.0, max_tokens=item.max_tokens, stop=item.stop)
            for item in self._items
        ]

    def scores(self, results: Sequence[RequestOutput]) -> list[Score]:
        """One score per group and metric."""
        graded: dict[tuple[str, str], list[bool]] = {}
        for item, result in zip(self._items, results, strict=True):
            for metric, success in self._grade(item, result).items():
                graded.setdefault((item.group, metric), []).append(success)
        control = control_name(self.controls)
        return [
            Score(self.task, group, control, metric, len(successes), *share(successes))
            for (group, metric), successes in graded.items()
        ]

    def answers(self, results: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Expected and given answer of every item."""
        return [
            {
                "group": item.group,
                "num_prompt_tokens": len(item.prompt),
                "expected": item.answer,
                "answer": result.outputs[0].text,
                **self._grade(item, result),
            }
            for item, result in zip(self._items, results, strict=True)
        ]

    def _grade(self, item: Item, result: RequestOutput) -> dict[str, bool]:
        """Metrics of one answer. An answer that has not come to its end is not exact."""
        output = result.outputs[0]
        ended = output.finish_reason is FinishReason.STOP
        grades = {"exact": ended and output.text == item.answer}
        if self.task == "json":
            value = _parsed(output.text)
            grades["values"] = value is not None and value == json.loads(item.answer)
            grades["parses"] = value is not None
        return grades


def _parsed(text: str) -> dict[str, Any] | None:
    """The JSON object in a text, or None."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
