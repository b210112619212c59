"""Measuring a checkpoint on any backend: jobs, engines, results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer.api import LLM
from deepinfer.config import EngineConfig, override
from deepinfer.device.errors import ConfigError, RequestError
from deepinfer.engine.outputs import RequestOutput
from deepinfer.evaluation.bits_per_byte import TASK as BITS_PER_BYTE
from deepinfer.evaluation.bits_per_byte import BitsPerByte
from deepinfer.evaluation.items import task_names
from deepinfer.evaluation.job import Job, control_name
from deepinfer.evaluation.questions import Questions
from deepinfer.evaluation.score import Score
from deepinfer.model.controls import Controls, EngramRows, Selections
from deepinfer.text.tokenizer import TextTokenizer

# What each task is also asked without, to show that it needs it.
TASK_CONTROLS: dict[str, tuple[Controls, ...]] = {
    "recall": (
        Controls(selections=Selections.NONE),
        Controls(selections=Selections.RANDOM),
    ),
    "define": (Controls(engram=EngramRows.ZERO),),
}


class EvaluationProgress:
    """Somebody who is told how far an evaluation is; this one says nothing."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """All jobs of a run are known; called again where they run once more."""

    def advance(self, job: Job, num_tokens: int) -> None:
        """One request of a job has ended; `num_tokens` were read and generated for it."""


@dataclass(slots=True)
class Evaluation:
    """What was measured.

    Attributes:
        scores: in the order of the jobs.
        answers: what was answered, item by item.
        num_tokens: prompt and generated tokens of all requests.
        elapsed_s: seconds, loading included.
        marks: of the engine without controls, for example `random_weights`.
    """

    scores: list[Score] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    elapsed_s: float = 0.0
    marks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Figures of the report."""
        return {
            "scores": [score.to_json() for score in self.scores],
            "num_tokens": self.num_tokens,
            "elapsed_s": round(self.elapsed_s, 1),
            "marks": list(self.marks),
        }


def all_tasks() -> tuple[str, ...]:
    """Every task, bits per byte first."""
    return (BITS_PER_BYTE, *task_names())


def plan_jobs(
    config: EngineConfig,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    with_controls: bool = True,
) -> list[Job]:
    """Jobs in an order in which each engine is loaded once.

    Args:
        config: names the checkpoint, whose tokenizer makes the prompts.
        tasks: names of `all_tasks`.
        limit: most items (windows of a text) of a group; None: all.
        with_controls: also measure the tasks of `TASK_CONTROLS` with parts out of action.
    Raises:
        ConfigError: a task is unknown or none is named, or the configuration already has a
            measuring control.
    """
    unknown = [task for task in tasks if task not in all_tasks()]
    if unknown or not tasks:
        raise ConfigError(
            f"tasks are {','.join(tasks) or 'empty'}; expected some of {','.join(all_tasks())}"
        )
    if config.measurement.controls.marks:
        raise ConfigError(
            f"measurement is {control_name(config.measurement.controls)}; an evaluation sets it "
            "for its own controls: leave it out"
        )
    tokenizer = TextTokenizer.from_directory(config.checkpoint.directory)
    pairs = [(task, Controls()) for task in dict.fromkeys(tasks)]
    if with_controls:
        pairs += [(task, controls) for task, _ in pairs for controls in TASK_CONTROLS.get(task, ())]
    return [
        BitsPerByte(tokenizer, controls=controls, limit=limit)
        if task == BITS_PER_BYTE
        else Questions(task, tokenizer, controls=controls, limit=limit)
        for task, controls in pairs
    ]


def evaluate(
    config: EngineConfig,
    jobs: Sequence[Job],
    progress: EvaluationProgress | None = None,
) -> Evaluation:
    """Run the jobs, one engine for each control.

    Args:
        config: of the engine.
        jobs: from `plan_jobs`.
        progress: told how far it is.
    Raises:
        RequestError: a request failed; a figure without it would not be the task's.
    """
    progress = progress or EvaluationProgress()
    progress.begin(jobs)
    evaluation, began = Evaluation(), time.monotonic()
    for controls in dict.fromkeys(job.controls for job in jobs):
        with LLM(
            override(
                config,
                {
                    "measurement.selections": controls.selections.value,
                    "measurement.engram": controls.engram.value,
                },
            )
        ) as llm:
            for job in (job for job in jobs if job.controls == controls):
                _run_job(llm, job, evaluation, progress)
    evaluation.elapsed_s = time.monotonic() - began
    return evaluation


def _run_job(llm: LLM, job: Job, evaluation: Evaluation, progress: EvaluationProgress) -> None:
    def num_tokens(result: RequestOutput) -> int:
        generated = sum(len(output.token_ids) for output in result.outputs)
        return len(result.prompt_token_ids) + generated

    def finished(result: RequestOutput) -> None:
        fault = result.error or next((o.error for o in result.outputs if o.error), None)
        if fault is not None:
            raise RequestError(f"task {job.task}: a request failed, so there is no score: {fault}")
        progress.advance(job, num_tokens(result))

    results = llm.generate(job.prompts, job.params, on_finished=finished)
    own = control_name(job.controls)
    evaluation.scores += job.scores(results)
    evaluation.num_tokens += sum(num_tokens(result) for result in results)
    for answer in job.answers(results):
        evaluation.answers.append({"task": job.task, "control": own, **answer})
    if not own:
        evaluation.marks = results[0].marks
