"""`deepinfer bench`: measurements of single mechanisms."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.options import add_common_options, resolve_config
from deepinfer.device.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.bench.replay import ReplayFigures
    from deepinfer.config import EngineConfig

_LENGTHS = (256, 512, 1024, 2048, 4096)
_FLASH_LENGTHS = (4096, 8192, 16_384, 32_768)
_CHUNK_TOKENS = 4096
_EPILOG = """\
Work is counted in the op calls of the first run of each kind; beside it stands the formula, which
knows the configuration only. Times are the least of the repeats; `no launches` leaves out what a
prompt of one token takes. replay.keep_tokens says how many tokens the decoder runs.

--layers takes that many layers of V4.1-Flash at their published widths, with random weights in
the published formats, drawn on the backend's device: about 7.5 GB for a layer with all experts.

example:
  deepinfer bench replay --svg replay.svg
  deepinfer bench replay --backend cuda_sm100 --layers 2,3,20,21 --json replay.json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` with its own sub-commands."""
    bench = subparsers.add_parser("bench", help="measure one mechanism: bounded replay")
    commands = bench.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    parser = commands.add_parser(
        "replay",
        help="work and time of bounded replay by prompt length",
        description="Compare bounded replay with running every prompt row in every layer: counted "
        "multiply-accumulates and measured time, by prompt length.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths", metavar="A,B", help=f"prompt lengths in tokens ({_shown(_LENGTHS)}; with "
        f"--layers {_shown(_FLASH_LENGTHS)})",
    )  # fmt: skip
    parser.add_argument(
        "--layers", metavar="A,B", help="measure these layers of V4.1-Flash, not the checkpoint"
    )
    parser.add_argument(
        "--experts", type=int, metavar="N", help="with --layers: routed experts of a layer (384)"
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=_CHUNK_TOKENS,
        metavar="N",
        help=f"rows of a step ({_CHUNK_TOKENS})",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs (3)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the ratios")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run `bench replay`; the exit code.

    Raises:
        DeepInferError: configuration or options are not valid, or the backend cannot run it.
    """
    config = resolve_config(args)
    for option in ("chunk", "repeats"):
        if getattr(args, option) < 1:
            raise ConfigError(f"--{option} {getattr(args, option)}: expected a number from 1")
    if args.svg is not None and not args.svg.parent.is_dir():
        raise ConfigError(f"--svg {args.svg}: there is no folder {args.svg.parent}; create it")
    if args.experts is not None and args.layers is None:
        raise ConfigError("--experts goes with --layers; a checkpoint has the experts it has")
    layers = None if args.layers is None else _numbers("--layers", args.layers)
    lengths: Sequence[int] = _FLASH_LENGTHS if layers else _LENGTHS
    if args.lengths is not None:
        lengths = _numbers("--lengths", args.lengths)
        if min(lengths) < 1:
            raise ConfigError(f"--lengths {args.lengths}: expected numbers from 1")
    name, figures = _measure(config, args, layers, lengths)
    _print_table(figures, name)
    if args.svg is not None:
        from deepinfer.cli.replay_svg import draw

        title = "Bounded replay over running every row"
        args.svg.write_text(draw(figures, title=title, subtitle=name), encoding="utf-8")
    if args.json is not None:
        from deepinfer.cli.report import write_json

        results = {
            "model": name,
            "layers": None if layers is None else list(layers),
            "experts": args.experts,
            "chunk_tokens": args.chunk,
            "repeats": args.repeats,
            "lengths": [entry.to_json() for entry in figures],
        }
        write_json(args.json, "bench replay", results, config=config)
    return 0


def _measure(
    config: EngineConfig,
    args: argparse.Namespace,
    layers: Sequence[int] | None,
    lengths: Sequence[int],
) -> tuple[str, list[ReplayFigures]]:
    """What was measured, in words, and its figures."""
    from deepinfer.bench.flash_layers import flash_layers, load_flash_layers
    from deepinfer.bench.replay import measure_replay
    from deepinfer.bench.work_counter import WorkCounter
    from deepinfer.cli.console import stderr_console
    from deepinfer.config.replay import ReplayMode
    from deepinfer.device.hookspecs import BackendConfig
    from deepinfer.device.overlay import with_ops
    from deepinfer.device.registry import load_backend
    from deepinfer.engine.replay_rule import ReplayRule
    from deepinfer.model.config import V41Config
    from deepinfer.model.loading import load_model

    if layers is None:
        model = V41Config.from_json(config.checkpoint.directory)
        name = config.checkpoint.directory.name
    else:
        model = flash_layers(layers, num_experts=args.experts)
        name = f"V4.1-Flash layers {_shown(layers)}, {model.n_routed_experts} experts"
    # Refuses a tail that is too short for the model.
    ReplayRule(config.replay.model_copy(update={"mode": ReplayMode.BOUNDED}), model)
    longest = max(lengths)
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"a prompt of {longest} tokens is longer than the model's "
            f"{model.max_position_embeddings} positions; give shorter --lengths"
        )
    backend = load_backend(
        BackendConfig(config.backend.name, config.numerics, dict(config.backend.options))
    )
    figures: list[ReplayFigures] = []
    try:
        counter = WorkCounter(backend.ops, model)
        counted = with_ops(backend, counter.ops)
        stderr_console().print(f"{name} on {backend.name}: loading", highlight=False)
        if layers is None:
            random = config.checkpoint.seed if config.checkpoint.random_weights else None
            loaded = load_model(
                config.checkpoint.directory, counted, max_positions=longest, random_seed=random
            )
        else:
            loaded = load_flash_layers(model, counted, max_positions=longest)
        for entry in measure_replay(
            loaded,
            backend,
            counter,
            lengths=lengths,
            keep_tokens=config.replay.keep_tokens,
            chunk_tokens=args.chunk,
            repeats=args.repeats,
        ):
            figures.append(entry)
            stderr_console().print(
                f"{entry.num_tokens} tokens: {entry.exact_us / 1000:.1f} ms, bounded "
                f"{entry.bounded_us / 1000:.1f} ms",
                highlight=False,
            )
    finally:
        backend.close()
    return f"{name} on {backend.name}, keep {config.replay.keep_tokens}", figures


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected whole numbers such as 2,3,20,21") from error


def _shown(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _print_table(figures: Sequence[ReplayFigures], name: str) -> None:
    from rich.table import Table

    from deepinfer.cli.console import stdout_console

    table = Table(caption=f"{name}; all rows / bounded, and bounded over all rows")
    for title in ("tokens", "GFLOP", "counted", "formula", "ms", "time", "no launches"):
        table.add_column(title, justify="right")
    for entry in figures:
        row_ratio = entry.row_time_ratio
        table.add_row(
            f"{entry.num_tokens:,}",
            f"{2e-9 * entry.exact_macs:,.1f} / {2e-9 * entry.bounded_macs:,.1f}",
            f"{entry.counted_ratio:.3f}",
            f"{entry.formula_ratio:.3f}",
            f"{1e-3 * entry.exact_us:,.0f} / {1e-3 * entry.bounded_us:,.0f}",
            f"{entry.time_ratio:.3f}",
            "" if row_ratio is None else f"{row_ratio:.3f}",
        )
    stdout_console().print(table)
