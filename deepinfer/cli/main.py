"""The `deepinfer` command: finds the sub-command, runs it, turns errors into exit codes.

Exit codes: 0 done; 1 done, but some requests failed; 2 the command could not do its work;
130 interrupted; 141 whoever read the output went away.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from deepinfer.device.errors import ConfigError, DeepInferError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: its module has `add_parser(subparsers)` and `run(args)`."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("generate", "deepinfer.cli.generate_cmd", "answer prompts and show the text"),
    Command("batch", "deepinfer.cli.batch_cmd", "answer a file of requests"),
    Command("backends", "deepinfer.cli.backends_cmd", "list backends, or why they are missing"),
    Command("backend", "deepinfer_conformance.new_backend.cli", "start a package for a new device"),
    Command("conformance", "deepinfer_conformance.cli", "check a backend against the reference"),
    Command("inspect", "deepinfer.cli.inspect_cmd", "describe a checkpoint from its headers"),
    Command("eval", "deepinfer.cli.eval_cmd", "measure what a checkpoint can do"),
    Command("bench", "deepinfer.cli.bench_cmd", "measure one mechanism: bounded replay"),
    Command("trace", "deepinfer.cli.trace_cmd", "record what the model computes, or compare it"),
    Command("timeline", "deepinfer.cli.timeline_cmd", "draw where the time of a run went"),
)

_EPILOG = """\
`deepinfer COMMAND --help` explains a command and ends with an example.

example:
  deepinfer generate "Once upon a time there was"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: arguments after the program's name; None takes those of the process.
    Raises:
        SystemExit: the arguments are malformed, or ask for help or the version.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The options of the program itself take no value, so the first word is the command.
    word = next((argument for argument in arguments if not argument.startswith("-")), None)
    command = next((command for command in COMMANDS if command.name == word), None)
    module = importlib.import_module(command.module) if command else None
    parser = _build_parser(command, module)
    if word is not None and command is None:
        parser.error(_unknown_command(word))
    args = parser.parse_args(arguments)
    assert module is not None  # without a command, the parser has refused the line
    try:
        exit_code = _run(module, args)
        sys.stdout.flush()
    except DeepInferError as error:
        if args.debug:
            raise
        _write_error(f"deepinfer: {error}")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        if args.debug:
            raise
        _write_error("deepinfer: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    return exit_code


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    from deepinfer.cli.log import configure_logging

    configure_logging(
        verbosity=getattr(args, "verbose", 0) - getattr(args, "quiet", 0), env=os.environ
    )
    json_path: Path | None = getattr(args, "json", None)
    if json_path is not None and not json_path.parent.is_dir():
        # Said before the work, not after it.
        raise ConfigError(
            f"--json {json_path}: there is no folder {json_path.parent}; create it first"
        )
    exit_code: int = module.run(args)
    return exit_code


def _unknown_command(word: str) -> str:
    names = [command.name for command in COMMANDS]
    near = difflib.get_close_matches(word, names, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names)}"
    return f"{word!r} is not a command; {remedy}"


def _build_parser(chosen: Command | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepinfer",
        description="Offline inference for the DeepSeek-V4.1 family on exchangeable backends.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, help="show the version and end")
    parser.add_argument(
        "--debug", action="store_true", help="show where in the program an error was raised"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        if command is chosen and module is not None:
            module.add_parser(subparsers)
        else:
            # Named for the list and for messages only; its module is not loaded.
            subparsers.add_parser(command.name, help=command.summary)
    return parser


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        import deepinfer

        sys.stdout.write(f"deepinfer {deepinfer.__version__}\n")
        parser.exit()


def _write_error(text: str) -> None:
    sys.stderr.write(text + "\n")


def _silence_stdout() -> None:
    """Send what is still buffered nowhere, so that the interpreter's own flush does not fail."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
