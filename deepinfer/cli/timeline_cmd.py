"""`deepinfer timeline`: pictures of a run's trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepinfer.device.errors import ConfigError

_EPILOG = """\
The trace comes from --timeline of `generate` and `batch run`; chrome://tracing and
https://ui.perfetto.dev read it too. The picture is an SVG that needs nothing else.

example:
  deepinfer generate "Once upon a time" --max-tokens 60 --timeline run.trace.json
  deepinfer timeline plot run.trace.json -o run.svg
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `timeline` with its own sub-commands."""
    timeline = subparsers.add_parser("timeline", help="draw where the time of a run went")
    commands = timeline.add_subparsers(dest="timeline_command", required=True, metavar="COMMAND")
    parser = commands.add_parser(
        "plot",
        help="draw a trace as an SVG",
        description="Draw host phases, device steps and idle gaps of a trace as an SVG.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="file that --timeline wrote")
    parser.add_argument("-o", "--output", type=Path, help="SVG to make; default: TRACE.svg")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps drawn (10)")
    parser.add_argument(
        "--first-step", type=int, metavar="N", help="first of them; default: the middle of the run"
    )
    parser.add_argument("--title", metavar="TEXT", help="default: the name of the trace")
    parser.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show where in the program an error was raised",
    )


def run(args: argparse.Namespace) -> int:
    """Run `timeline plot`; returns the exit code.

    Raises:
        ConfigError: the trace cannot be read or holds no such step.
    """
    from deepinfer.cli.console import write_text
    from deepinfer.cli.timeline_svg import draw
    from deepinfer.cli.trace_events import read_trace

    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: expected a whole number from 1")
    trace = read_trace(args.trace)
    window = trace.window(args.first_step, args.steps)
    output: Path = args.output or args.trace.with_suffix(".svg")
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}; create it first")
    output.write_text(draw(trace, window, title=args.title or args.trace.name), encoding="utf-8")
    write_text(f"{output}: steps {window.first_step} to {window.last_step}; {trace.summary()}\n")
    return 0
