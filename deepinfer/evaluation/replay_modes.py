"""The same questions in exact and in bounded replay, answer by answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.config import EngineConfig, override
from deepinfer.config.replay import ReplayMode
from deepinfer.evaluation.job import Job
from deepinfer.evaluation.run import EvaluationProgress, evaluate


@dataclass(frozen=True, slots=True)
class TaskDifference:
    """Exact answers of one group of questions in both modes.

    Attributes:
        task: its name.
        group: distance, length, ... within the task.
        num_items: questions.
        num_cut: those whose prompt is longer than what is kept; the others cannot differ.
        exact_share: right answers in mode exact.
        bounded_share: right answers in mode bounded.
        num_changed: questions whose answer is another text.
        num_lost: right in mode exact only.
        num_gained: right in mode bounded only.
        difference_error: standard error of the difference of the shares, which are paired.
    """

    task: str
    group: str
    num_items: int
    num_cut: int
    exact_share: float
    bounded_share: float
    num_changed: int
    num_lost: int
    num_gained: int
    difference_error: float

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def compare_modes(
    config: EngineConfig, jobs: Sequence[Job], progress: EvaluationProgress | None = None
) -> list[TaskDifference]:
    """Answer the jobs' questions in both modes.

    Args:
        config: of the engine; its replay mode is replaced.
        jobs: questions, without controls.
        progress: told how far it is.
    Raises:
        RequestError: a request failed.
    """
    exact, bounded = (
        evaluate(override(config, {"replay.mode": mode.value}), jobs, progress).answers
        for mode in (ReplayMode.EXACT, ReplayMode.BOUNDED)
    )
    return differences(exact, bounded, config.replay.keep_tokens)


def differences(
    exact: Sequence[dict[str, Any]], bounded: Sequence[dict[str, Any]], keep_tokens: int
) -> list[TaskDifference]:
    """Answers of both modes, in the same order, by task and group."""
    groups: dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for first, second in zip(exact, bounded, strict=True):
        groups.setdefault((first["task"], first["group"]), []).append((first, second))
    result = []
    for (task, group), pairs in groups.items():
        num = len(pairs)
        lost = sum(e["exact"] and not b["exact"] for e, b in pairs)
        gained = sum(b["exact"] and not e["exact"] for e, b in pairs)
        # Half an item is added to each side, so that the error of no change is not zero.
        flips, net = lost + gained + 1, gained - lost
        result.append(
            TaskDifference(
                task=task,
                group=group,
                num_items=num,
                num_cut=sum(e["num_prompt_tokens"] > keep_tokens for e, _ in pairs),
                exact_share=sum(e["exact"] for e, _ in pairs) / num,
                bounded_share=sum(b["exact"] for _, b in pairs) / num,
                num_changed=sum(e["answer"] != b["answer"] for e, b in pairs),
                num_lost=lost,
                num_gained=gained,
                difference_error=math.sqrt(flips - net**2 / num) / num,
            )
        )
    return result
