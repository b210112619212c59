"""Showing how far a batch run is."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProgressState:
    """Where a run is. `num_total` counts all lines of the input that are not blank."""

    num_total: int
    num_done: int
    num_failed: int
    generated_tokens: int
    kv_used_blocks: int
    kv_total_blocks: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second since the run began."""
        return self.generated_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def kv_share(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.kv_used_blocks / self.kv_total_blocks if self.kv_total_blocks else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Expected seconds to the end at the pace so far; None while nothing is done."""
        if self.num_done == 0:
            return None
        return self.elapsed_s / self.num_done * (self.num_total - self.num_done)

    def figures(self) -> str:
        """The figures in words, without the count of requests."""
        remaining = self.remaining_s
        eta = "--:--" if remaining is None else _clock_time(remaining)
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"{self.tokens_per_s:.1f} tok/s, KV {self.kv_share:.0%}, ETA {eta}{failed}"


class ProgressView(Protocol):
    """Somebody who shows progress; called after every step of the engine."""

    def show(self, state: ProgressState) -> None:
        """Take the newest state; may leave it out when it comes too soon."""
        ...

    def close(self) -> None:
        """Stop showing; the last state stays visible."""
        ...


class NoProgress:
    """Shows nothing."""

    def show(self, state: ProgressState) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class BarProgress:
    """A bar on a terminal."""

    def __init__(self, console: Console) -> None:
        """Show the bar below whatever else goes through `console`."""
        self._progress = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} requests"),
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            # Text that goes to a file or a pipe must not turn up on the terminal instead.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("starting", total=0)
        self._progress.start()

    def show(self, state: ProgressState) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            total=state.num_total,
            completed=state.num_done,
            description=state.figures(),
        )

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class LogProgress:
    """A line in the log every few seconds, for runs without a terminal."""

    def __init__(
        self, *, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Log at most every `interval_s` seconds of `clock`, and the last state at the end."""
        self._interval_s = interval_s
        self._clock = clock
        self._due_s = clock() + interval_s
        self._unlogged: ProgressState | None = None

    def show(self, state: ProgressState) -> None:
        """Log the state if it is time."""
        self._unlogged = state
        if self._clock() >= self._due_s:
            self._log(state)

    def close(self) -> None:
        """Log the last state."""
        if self._unlogged is not None:
            self._log(self._unlogged)

    def _log(self, state: ProgressState) -> None:
        logger.info("%d/%d requests, %s", state.num_done, state.num_total, state.figures())
        self._due_s = self._clock() + self._interval_s
        self._unlogged = None


def choose_progress(console: Console) -> ProgressView:
    """A bar on a terminal, else lines in the log."""
    return BarProgress(console) if console.is_terminal else LogProgress()


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
