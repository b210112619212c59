"""`deepinfer eval --replay both`: what bounded replay changes, side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from deepinfer.cli.console import stderr_console, stdout_console
from deepinfer.cli.eval_progress import eval_progress
from deepinfer.cli.report import write_json
from deepinfer.device.errors import ConfigError
from deepinfer.evaluation.bits_per_byte import TASK as BITS_PER_BYTE
from deepinfer.evaluation.replay_difference import ReplayDifference, measure_replay_difference
from deepinfer.evaluation.replay_modes import TaskDifference, compare_modes
from deepinfer.evaluation.run import plan_jobs
from deepinfer.model.config import V41Config
from deepinfer.model.replay import lossless_keep_tokens

if TYPE_CHECKING:
    from deepinfer.config import EngineConfig


def run_both(
    args: argparse.Namespace, config: EngineConfig, tasks: Sequence[str], limit: int | None
) -> int:
    """Measure, show and write; the exit code.

    Args:
        args: of `eval`.
        config: resolved.
        tasks: names; bits per byte stands for the comparison of distributions.
        limit: most items of a group, windows of a text.
    Raises:
        DeepInferError: a task or the configuration is not valid, or a request failed.
    """
    if args.answers is not None:
        raise ConfigError("--answers goes with one replay mode; leave it out of --replay both")
    plan_jobs(config, tasks, limit=1, with_controls=False)  # refuses unknown names
    began = time.monotonic()
    questions = [task for task in tasks if task != BITS_PER_BYTE]
    found: list[TaskDifference] = []
    difference: ReplayDifference | None = None
    if BITS_PER_BYTE in tasks:
        difference = measure_replay_difference(config, limit=limit, on_window=_show_window)
    if questions:
        jobs = plan_jobs(config, questions, limit=limit, with_controls=False)
        with eval_progress() as progress:
            found = compare_modes(config, jobs, progress)
    elapsed_s = time.monotonic() - began
    console = stdout_console()
    if difference is not None:
        console.print(_distances(difference))
        console.print(_texts(difference))
    if found:
        console.print(_tasks(found))
    needed = lossless_keep_tokens(V41Config.from_json(config.checkpoint.directory))
    console.print(
        f"kept tokens: {config.replay.keep_tokens}; from {needed} on, this model's answers are the "
        f"same bit by bit; {elapsed_s:.0f} s",
        highlight=False,
    )
    if args.json is not None:
        figures = {
            "keep_tokens": config.replay.keep_tokens,
            "lossless_keep_tokens": needed,
            "elapsed_s": round(elapsed_s, 1),
            "distributions": None if difference is None else difference.to_json(),
            "tasks": [entry.to_json() for entry in found],
        }
        write_json(args.json, "eval --replay both", figures, config=config)
    return 0


def _show_window(text: str, done: int, total: int) -> None:
    if done == total or done % 8 == 0:
        stderr_console().print(f"{text}: {done} of {total} windows, both ways", highlight=False)


def _distances(difference: ReplayDifference) -> Table:
    table = Table(title="KL(exact || bounded) in nats, by tokens after the prompt's end")
    for title in ("tokens", "windows", "mean", "std. error", "largest", "same top"):
        table.add_column(title, justify="right")
    for entry in difference.distances:
        span = str(entry.first) if entry.first == entry.last else f"{entry.first}-{entry.last}"
        error = "" if entry.kl_error is None else f"{entry.kl_error:.2e}"
        table.add_row(
            span,
            str(entry.num_windows),
            f"{entry.mean_kl:.2e}",
            error,
            f"{entry.max_kl:.2e}",
            f"{100 * entry.same_top_share:.2f} %",
        )
    return table


def _texts(difference: ReplayDifference) -> Table:
    table = Table("text", title="bits per byte of what follows a prompt")
    for title in ("windows", "exact", "bounded", "difference", "std. error"):
        table.add_column(title, justify="right")
    for entry in difference.texts:
        change = entry.bounded_bits_per_byte - entry.exact_bits_per_byte
        error = "" if entry.difference_error is None else f"{entry.difference_error:.5f}"
        table.add_row(
            entry.text,
            str(entry.num_windows),
            f"{entry.exact_bits_per_byte:.4f}",
            f"{entry.bounded_bits_per_byte:.4f}",
            f"{change:+.5f}",
            error,
        )
    return table


def _tasks(found: Sequence[TaskDifference]) -> Table:
    table = Table("task", "group", title="right answers, paired by question")
    for title in ("items", "cut", "exact", "bounded", "lost", "gained", "other text"):
        table.add_column(title, justify="right")
    for entry in found:
        table.add_row(
            entry.task,
            entry.group,
            str(entry.num_items),
            str(entry.num_cut),
            f"{100 * entry.exact_share:.1f} %",
            f"{100 * entry.bounded_share:.1f} %",
            str(entry.num_lost),
            str(entry.num_gained),
            str(entry.num_changed),
        )
    return table
