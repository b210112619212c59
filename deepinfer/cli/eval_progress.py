"""Showing how far an evaluation is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepinfer.cli.console import stderr_console
from deepinfer.evaluation.job import Job, control_name
from deepinfer.evaluation.run import EvaluationProgress

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 20.0


def _label(job: Job) -> str:
    control = control_name(job.controls)
    return f"{job.task} ({control})" if control else job.task


class _Bar(EvaluationProgress):
    """Counts tokens, because items differ a hundredfold in length."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("loading", total=None)
        self._total = 0

    def begin(self, jobs: Sequence[Job]) -> None:
        self._total += _expected_tokens(jobs)
        self._progress.update(self._task, total=self._total)

    def advance(self, job: Job, num_tokens: int) -> None:
        self._progress.update(self._task, description=_label(job), advance=num_tokens)


class _Lines(EvaluationProgress):
    """A log line every now and then."""

    def __init__(self) -> None:
        self._total = self._done = 0
        self._last_s = time.monotonic()

    def begin(self, jobs: Sequence[Job]) -> None:
        self._total += _expected_tokens(jobs)
        _log.info("%d jobs, about %d tokens", len(jobs), self._total)

    def advance(self, job: Job, num_tokens: int) -> None:
        self._done += num_tokens
        now_s = time.monotonic()
        if now_s - self._last_s >= _SECONDS_BETWEEN_LINES:
            self._last_s = now_s
            _log.info("%s: %d of about %d tokens", _label(job), self._done, self._total)


def _expected_tokens(jobs: Sequence[Job]) -> int:
    """Prompt tokens and the most that answers may take."""
    return sum(
        len(prompt) + (params.max_tokens or 0)
        for job in jobs
        for prompt, params in zip(job.prompts, job.params, strict=True)
    )


@contextmanager
def eval_progress() -> Iterator[EvaluationProgress]:
    """A progress view that suits standard error."""
    console = stderr_console()
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens, left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress)
