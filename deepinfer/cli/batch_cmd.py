"""`deepinfer batch`: answers for a file of requests."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.cli.options import (
    add_common_options,
    add_drafts_option,
    add_timeline_option,
    resolve_config,
)

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer.batch.request import BatchRequest
    from deepinfer.batch.summary import BatchSummary

_EPILOG = """\
a line of the input:
  {"custom_id": "a", "method": "POST", "url": "/v1/completions",
   "body": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}}

Records are written in the order in which requests end: match them by custom_id. The resolved
configuration is kept in OUTPUT.config.json. Exit code: 0 every line was answered, 1 some failed
(their records say why), 2 the run could not begin.

example:
  deepinfer batch run -i examples/demo.jsonl -o results.jsonl --print
"""
_COMMAND = "batch run"
_SUMMARY_ROWS = {
    "num_ok": "requests answered",
    "num_failed": "requests failed",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "generated tokens",
    "seconds": "seconds",
    "completion_tokens_per_s": "generated tokens per second",
}
_OPEN_REQUESTS_PER_SEQUENCE = 4  # enough that the scheduler always finds one to admit


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `batch` with its own sub-commands."""
    batch = subparsers.add_parser("batch", help="answer a file of requests")
    commands = batch.add_subparsers(dest="batch_command", required=True, metavar="COMMAND")
    parser = commands.add_parser(
        "run",
        help="answer every line of a file",
        description="Answer every line of a file of OpenAI batch requests for /v1/completions.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-i", "--input", type=Path, required=True, help="file of requests")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of results to make")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    parser.add_argument("--print", action="store_true", help="show each answer as it ends")
    add_timeline_option(parser)
    add_drafts_option(parser)
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run `batch run`; returns the exit code.

    Raises:
        DeepInferError: the configuration or a file cannot be used.
    """
    config = resolve_config(args)

    from deepinfer.batch.output_file import check_paths

    check_paths(args.input, args.output, overwrite=args.overwrite)

    from deepinfer.batch.progress import choose_progress
    from deepinfer.batch.run import run_batch
    from deepinfer.cli.console import stderr_console
    from deepinfer.cli.report import write_json
    from deepinfer.cli.speculation_line import show_speculation
    from deepinfer.cli.timeline_table import show_timeline
    from deepinfer.engine.llm_engine import LLMEngine
    from deepinfer.text.tokenizer import TextTokenizer

    directory = config.checkpoint.directory
    tokenizer = TextTokenizer.from_directory(directory)
    engine = LLMEngine.from_config(config, timeline_file=args.timeline)
    # Written before the run, so that an interrupted one tells how it was made, too.
    write_json(Path(f"{args.output}.config.json"), _COMMAND, {}, config=config)
    with closing(engine):
        summary = run_batch(
            engine,
            args.input,
            args.output,
            model_name=directory.resolve().name,
            tokenizer=tokenizer,
            defaults=config.sampling,
            overwrite=args.overwrite,
            max_num_open=_OPEN_REQUESTS_PER_SEQUENCE * config.scheduler.max_num_seqs,
            progress=choose_progress(stderr_console()),
            on_record=_print_record if args.print else None,
        )
    _show_summary(stderr_console(), summary, args.output)
    figures = summary.to_json() | show_speculation(engine.speculation, args.drafts_svg)
    figures |= show_timeline(engine.timeline)
    if args.json is not None:
        write_json(args.json, _COMMAND, figures, config=config)
    return summary.exit_code


def _print_record(request: BatchRequest | None, record: dict[str, Any]) -> None:
    """Show one record on standard output: its name, the prompt dimmed, the answers."""
    from rich.text import Text

    from deepinfer.cli.console import stdout_console

    name = record["custom_id"] or f"line {record['error']['line']}"
    shown = Text(f"[{name}]\n", "bold")
    if record["response"] is None:
        shown.append(f"{record['error']['message']}\n", "red")
    else:
        prompt = "" if request is None or request.echo else request.prompt
        if not isinstance(prompt, str):
            prompt = f"({len(prompt)} token ids) "
        for choice in record["response"]["body"]["choices"]:
            shown.append(prompt, "dim").append(choice["text"] + "\n", "not bold")
    stdout_console().print(shown, soft_wrap=True)


def _show_summary(console: Console, summary: BatchSummary, output: Path) -> None:
    from rich.table import Table

    figures = summary.to_json()
    table = Table(title=f"results in {output}", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, title in _SUMMARY_ROWS.items():
        table.add_row(title, f"{figures[name]:,}")
    for kind, title in (
        ("finish_reasons", "ended by"),
        ("error_codes", "failed:"),
        ("marks", "marked:"),
    ):
        for reason, count in figures[kind].items():
            table.add_row(f"{title} {reason}", f"{count:,}")
    console.print(table)
