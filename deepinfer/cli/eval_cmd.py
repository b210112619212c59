"""`deepinfer eval`: bits per byte on held-out texts, and tasks whose answers are known."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.options import add_common_options, resolve_config
from deepinfer.device.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.evaluation.run import Evaluation
    from deepinfer.evaluation.score import Score

_QUICK_LIMIT = 8
_EPILOG = f"""\
Tasks: bpb (bits per byte of nine held-out texts), recall (a code stated so many tokens ago), copy,
json, add, turns (something said turns ago), define. Answers are generated greedily and must be
exact. Controls ask recall again with the indexer's selections replaced by none and by random
ones, and define with Engram rows replaced by zeros: a task that stays right does not need them.

With the reference backend on 2 CPU cores the bundled checkpoint takes about 10 minutes (790,000
tokens), and --quick, which takes {_QUICK_LIMIT} items of a group, about 2.

--replay exact and --replay bounded set replay.mode. --replay both asks the tasks in both modes and
shows what differs; in place of bits per byte of whole texts, which need every row, it reads the
second half of each window after a bounded and after an exact first half, and compares the
distributions of every token (replay.keep_tokens says how many tokens are kept).

example:
  deepinfer eval --quick
  deepinfer eval --quick --replay both --set replay.keep_tokens=32
  deepinfer eval --tasks bpb,recall --numerics exact --out eval.json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `eval`."""
    parser = subparsers.add_parser(
        "eval",
        help="measure a checkpoint: bits per byte, tasks with known answers",
        description="Measure what a checkpoint can do, on any backend: bits per byte of held-out "
        "texts and exact answers of tasks, each with its standard error.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", metavar="A,B", help="tasks to measure (default: all)")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="at most N items of a group, N windows of a text"
    )
    parser.add_argument("--quick", action="store_true", help=f"short for --limit {_QUICK_LIMIT}")
    parser.add_argument(
        "--replay", choices=("exact", "bounded", "both"), help="replay mode, or both side by side"
    )
    parser.add_argument("--no-controls", action="store_true", help="leave the controls out")
    parser.add_argument(
        "--answers", type=Path, metavar="FILE", help="write every item's answer, a JSON line each"
    )
    parser.add_argument(
        "--out", dest="json", type=Path, metavar="FILE", help="the same as --json FILE"
    )
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run `eval`; the exit code.

    Raises:
        DeepInferError: the configuration or the options are not valid, or a request failed.
    """
    config = resolve_config(args)
    if args.quick and args.limit is not None:
        raise ConfigError(f"--quick is --limit {_QUICK_LIMIT}; leave --limit {args.limit} out")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; expected a number from 1")
    if args.answers is not None and not args.answers.parent.is_dir():
        # Said before the work, not after it.
        raise ConfigError(
            f"--answers {args.answers}: there is no folder {args.answers.parent}; create it"
        )
    from deepinfer.cli.console import stdout_console
    from deepinfer.cli.eval_progress import eval_progress
    from deepinfer.cli.report import write_json
    from deepinfer.config import override
    from deepinfer.evaluation.run import all_tasks, evaluate, plan_jobs

    tasks = all_tasks() if args.tasks is None else [n.strip() for n in args.tasks.split(",")]
    limit = _QUICK_LIMIT if args.quick else args.limit
    if args.replay == "both":
        from deepinfer.cli.eval_replay import run_both

        return run_both(args, config, tasks, limit)
    if args.replay is not None:
        config = override(config, {"replay.mode": args.replay})
    jobs = plan_jobs(config, tasks, limit=limit, with_controls=not args.no_controls)
    with eval_progress() as progress:
        evaluation = evaluate(config, jobs, progress)
    _print_table(evaluation)
    if args.answers is not None:
        lines = [json.dumps(answer, ensure_ascii=False) for answer in evaluation.answers]
        args.answers.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if args.json is not None:
        write_json(args.json, "eval", evaluation.to_json(), config=config)
    if evaluation.marks:
        stdout_console().print(f"marked: {', '.join(evaluation.marks)}")
    return 0


def _print_table(evaluation: Evaluation) -> None:
    from rich.table import Table

    from deepinfer.cli.console import stdout_console

    table = Table(
        "task", "group", "control", caption="bpb in bits per byte; shares of exact answers"
    )
    for title in ("items", "score", "std. error"):
        table.add_column(title, justify="right")
    previous: Score | None = None
    for score in evaluation.scores:
        if previous is not None and (previous.task, previous.control) != (
            score.task,
            score.control,
        ):
            table.add_section()
        group = score.group
        if score.metric not in ("bits_per_byte", "exact"):
            group += f": {score.metric}"
        figures = _figures(score.metric, (score.value, score.standard_error))
        table.add_row(score.task, group, score.control, str(score.num_items), *figures)
        previous = score
    stdout_console().print(table)
    stdout_console().print(
        f"{evaluation.num_tokens:,} tokens in {evaluation.elapsed_s:.0f} s", highlight=False
    )


def _figures(metric: str, values: Sequence[float | None]) -> list[str]:
    """Bits per byte as they are, shares in percent."""
    if metric == "bits_per_byte":
        return ["" if value is None else f"{value:.4f}" for value in values]
    return ["" if value is None else f"{100 * value:.1f} %" for value in values]
