"""`deepinfer trace`: every intermediate tensor of one sequence, and where two traces part."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.options import add_common_options, resolve_config
from deepinfer.device.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer.config import EngineConfig
    from deepinfer.model.trace_compare import TraceDifference

# One entry, because the order of several in a file's header is not fixed.
METADATA_KEY = "deepinfer_trace"

_EPILOG = """\
Exit code of --compare: 0 within the bound, 1 beyond it, 2 the files cannot be compared.

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
        "file, and those of the drafter's block after the last token if the checkpoint has one; "
        "or compare two such files and name the first layer and tensor that differ.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", help="text to trace (or --tokens)")
    parser.add_argument("--tokens", metavar="1,2,3", help="token ids to trace")
    parser.add_argument("--chunk", type=int, metavar="N", help="prefill in chunks of N tokens")
    parser.add_argument("--decode", action="store_true", help="token by token, as decode steps")
    parser.add_argument("--last", type=int, metavar="K", help="keep the last K positions only")
    parser.add_argument(
        "--no-drafter",
        action="store_true",
        help="leave the checkpoint's drafter out (for a backend that lacks its ops)",
    )
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
    """Run `trace`; the exit code.

    Raises:
        DeepInferError: the configuration, the options, the tokens or a file are not valid.
    """
    if args.compare:
        return _compare(args)
    config = resolve_config(args)
    if (args.prompt is None) == (args.tokens is None):
        raise ConfigError("trace needs a prompt or --tokens 1,2,3, and not both")
    if args.out is None:
        raise ConfigError("trace needs --out FILE to write the tensors to")
    if not args.out.parent.is_dir():
        # Said before the work, not after it.
        raise ConfigError(f"--out {args.out}: there is no folder {args.out.parent}; create it")
    if args.decode and args.chunk is not None:
        raise ConfigError(
            f"--chunk {args.chunk} with --decode: decoding takes one token a step; leave one out"
        )
    for name in ("chunk", "last"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; expected a number from 1")
    _write(args, config)
    return 0


def _token_ids(args: argparse.Namespace, directory: Path) -> list[int]:
    from deepinfer.text.tokenizer import TextTokenizer

    if args.prompt is not None:
        return TextTokenizer.from_directory(directory).encode(args.prompt)
    try:
        return [int(piece) for piece in args.tokens.split(",")]
    except ValueError:
        raise ConfigError(f"--tokens is {args.tokens!r}; expected ids such as 1,2,3") from None


def _write(args: argparse.Namespace, config: EngineConfig) -> None:
    from deepinfer.cli.console import stderr_console
    from deepinfer.cli.report import write_json
    from deepinfer.device.backend_config import BackendConfig
    from deepinfer.device.registry import load_backend
    from deepinfer.device.runtime import StepKind
    from deepinfer.model.loading import load_model
    from deepinfer.model.trace_run import trace_tokens

    directory = config.checkpoint.directory
    ids = _token_ids(args, directory)
    backend = load_backend(
        BackendConfig(config.backend.name, config.numerics, dict(config.backend.options))
    )
    try:
        seed = config.checkpoint.seed if config.checkpoint.random_weights else None
        loaded = load_model(
            directory,
            backend,
            max_positions=config.max_model_len,
            random_seed=seed,
            with_drafter=False if args.no_drafter else None,
            controls=config.measurement.controls,
        )
        kind = StepKind.DECODE if args.decode else StepKind.PREFILL
        tensors = trace_tokens(
            loaded,
            backend,
            ids,
            kind=kind,
            chunk=args.chunk,
            last=args.last,
            max_len=config.max_model_len,
        )
    finally:
        backend.close()
    _save(args.out, tensors, _origin(config, ids, loaded.marks))
    stderr_console().print(
        f"{len(tensors)} tensors of {len(tensors['logits'])} positions in {args.out}"
    )
    if args.json:
        figures = {"tensors": {name: list(value.shape) for name, value in tensors.items()}}
        write_json(args.json, "trace", figures, config=config)


def _origin(config: EngineConfig, ids: list[int], marks: tuple[str, ...]) -> dict[str, object]:
    """Where a trace comes from; nothing in it depends on the time or the folder."""
    from importlib.metadata import version

    return {
        "backend": config.backend.name,
        "checkpoint": config.checkpoint.directory.name,
        "marks": list(marks),
        "numerics": config.numerics.value,
        "token_ids": ids,
        "versions": {name: version(name) for name in ("deepinfer-hal", "torch")},
    }


def _save(path: Path, tensors: dict[str, Tensor], origin: dict[str, object]) -> None:
    import json

    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={METADATA_KEY: json.dumps(origin, sort_keys=True)})
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"--out {path}: cannot be written ({error}); name a file in a writable folder"
        ) from error


def _load(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise ConfigError(f"--compare: {path} does not exist; write it with --out first")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"--compare: {path} cannot be read ({error}); expected a file written with --out"
        ) from error


def _compare(args: argparse.Namespace) -> int:
    from deepinfer.cli.console import stdout_console
    from deepinfer.cli.report import write_json
    from deepinfer.model.trace_compare import compare_traces

    for name in ("prompt", "tokens", "chunk", "last", "out"):
        if getattr(args, name) is not None:
            raise ConfigError(f"{name} is given with --compare, which runs nothing; leave one out")
    if not (math.isfinite(args.bound) and args.bound >= 0):
        raise ConfigError(f"--bound is {args.bound}; expected a finite number from 0")
    left, right = (_load(path) for path in args.compare)
    differences = compare_traces(left, right, bound=args.bound)
    beyond = [entry for entry in differences if entry.position is not None]
    console = stdout_console()
    if beyond:
        first = beyond[0]
        console.print(
            f"first difference: {first.name} at position {first.position} "
            f"(error {first.error:.3g}, bound {args.bound:g}; {first.note})",
            soft_wrap=True,
        )
    else:
        console.print(f"no tensor beyond {args.bound:g}")
    _print_table(differences)
    if args.json:
        figures = {
            "bound": args.bound,
            "first": _figures(beyond[0]) if beyond else None,
            "tensors": [_figures(entry) for entry in differences],
        }
        write_json(args.json, "trace --compare", figures)
    return 1 if beyond else 0


def _print_table(differences: list[TraceDifference]) -> None:
    from rich.table import Table

    from deepinfer.cli.console import stdout_console

    table = Table("tensor", "max abs", "error", "first position", "compared")
    for entry in differences:
        where = "" if entry.position is None else str(entry.position)
        row = (entry.name, f"{entry.max_abs:.3g}", f"{entry.error:.3g}", where, entry.note)
        table.add_row(*row)
    stdout_console().print(table)


def _figures(entry: TraceDifference) -> dict[str, object]:
    """Figures of a tensor; an error that is no finite number is null, which JSON can hold."""
    return {
        "name": entry.name,
        "max_abs": entry.max_abs if math.isfinite(entry.max_abs) else None,
        "error": entry.error if math.isfinite(entry.error) else None,
        "position": entry.position,
        "note": entry.note,
    }
