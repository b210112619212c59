"""`deepinfer trace`: every intermediate tensor of one sequence, and where two traces part."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepinfer.cli.options import add_common_options, resolve_config

_EPILOG = """\
Exit code of --compare: 0 within the bound, 1 beyond it.

example:
  deepinfer trace --tokens 1,2,3 --numerics exact --out a.safetensors
  deepinfer trace --tokens 1,2,3 --numerics exact --chunk 1 --out b.safetensors
  deepinfer trace --compare a.safetensors b.safetensors
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace`."""
    parser = subparsers.add_parser(
        "trace",
        help="write every layer's tensors for a sequence, or compare two such files",
        description="Run one sequence and write logits, residual streams, expert ids and "
        "weights, selected positions and Engram hash ids of every position to a safetensors "
        "file; or compare two such files and name the first layer and tensor that differ.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", help="text to trace (or --tokens)")
    parser.add_argument("--tokens", metavar="1,2,3", help="token ids to trace")
    parser.add_argument("--chunk", type=int, metavar="N", help="prefill in chunks of N tokens")
    parser.add_argument("--decode", action="store_true", help="token by token, as decode steps")
    parser.add_argument("--last", type=int, metavar="K", help="keep the last K positions only")
    parser.add_argument("--out", type=Path, metavar="FILE", help="safetensors file to write")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="compare files")
    parser.add_argument(
        "--bound",
        type=float,
        default=1e-3,
        help="largest error accepted, relative to a tensor's largest value (default 1e-3)",
    )
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run `trace`; the exit code."""
    if args.compare:
        return _compare(args)
    from deepinfer.device.errors import ConfigError

    if (args.prompt is None) == (args.tokens is None):
        raise ConfigError("trace needs a prompt or --tokens 1,2,3, and not both")
    if args.out is None:
        raise ConfigError("trace needs --out FILE to write the tensors to")
    for name in ("chunk", "last"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; expected a number from 1")
    _write(args)
    return 0


def _token_ids(args: argparse.Namespace, directory: Path) -> list[int]:
    from deepinfer.device.errors import ConfigError
    from deepinfer.text.tokenizer import TextTokenizer

    if args.prompt is not None:
        return TextTokenizer.from_directory(directory).encode(args.prompt)
    try:
        return [int(piece) for piece in args.tokens.split(",")]
    except ValueError:
        raise ConfigError(f"--tokens is {args.tokens!r}; expected ids such as 1,2,3") from None


def _write(args: argparse.Namespace) -> None:
    import json

    from safetensors.torch import save_file

    from deepinfer.cli.console import stderr_console
    from deepinfer.cli.report import write_json
    from deepinfer.device.backend_config import BackendConfig
    from deepinfer.device.registry import load_backend
    from deepinfer.device.runtime import StepKind
    from deepinfer.model.loading import load_model
    from deepinfer.model.trace_run import trace_tokens

    config = resolve_config(args)
    directory = config.checkpoint.directory
    ids = _token_ids(args, directory)
    backend = load_backend(
        BackendConfig(config.backend.name, config.numerics, dict(config.backend.options))
    )
    try:
        seed = config.checkpoint.seed if config.checkpoint.random_weights else None
        loaded = load_model(
            directory, backend, max_positions=config.max_model_len, random_seed=seed
        )
        kind = StepKind.DECODE if args.decode else StepKind.PREFILL
        tensors = trace_tokens(loaded, backend, ids, kind=kind, chunk=args.chunk, last=args.last)
    finally:
        backend.close()
    metadata = {
        "backend": config.backend.name,
        "numerics": config.numerics.value,
        "checkpoint": directory.name,
        "token_ids": json.dumps(ids),
        "marks": ",".join(loaded.marks),
    }
    save_file(tensors, args.out, metadata=metadata)
    stderr_console().print(f"{len(tensors)} tensors of {len(ids)} positions in {args.out}")
    if args.json:
        figures = {"tensors": {name: list(value.shape) for name, value in tensors.items()}}
        write_json(args.json, "trace", figures, config=config)


def _compare(args: argparse.Namespace) -> int:
    from rich.table import Table
    from safetensors.torch import load_file

    from deepinfer.cli.console import stdout_console
    from deepinfer.cli.report import write_json
    from deepinfer.device.errors import ConfigError
    from deepinfer.model.trace_compare import compare_traces

    for path in args.compare:
        if not path.is_file():
            raise ConfigError(f"--compare: {path} does not exist; write it with --out first")
    left, right = (load_file(path) for path in args.compare)
    differences = compare_traces(left, right, bound=args.bound)
    beyond = [entry for entry in differences if entry.position is not None]
    console = stdout_console()
    if beyond:
        first = beyond[0]
        console.print(
            f"first difference: {first.name} at position {first.position} "
            f"(error {first.error:.3g}, bound {args.bound:g})"
        )
    else:
        console.print(f"no tensor beyond {args.bound:g}")
    table = Table("tensor", "error", "first position", "compared")
    for entry in differences:
        where = "" if entry.position is None else str(entry.position)
        table.add_row(entry.name, f"{entry.error:.3g}", where, entry.note)
    console.print(table)
    if args.json:
        figures = {
            "bound": args.bound,
            "first": beyond[0].name if beyond else None,
            "errors": {entry.name: entry.error for entry in differences if entry.error < 1e300},
            "beyond": [entry.name for entry in beyond],
        }
        write_json(args.json, "trace --compare", figures)
    return 1 if beyond else 0
