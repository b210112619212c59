"""`deepinfer backends`: what can run here, what cannot and why, and which ops a backend uses."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.options import add_common_options, resolve_config
from deepinfer.device.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer.device.op import OpChoice
    from deepinfer.device.registry import BackendInfo

_EPILOG = """\
The chosen backend (backend.name) is marked with an arrow. Nothing heavy is imported, unless
--explain creates the chosen backend to ask it, or --cost runs the model on it.

examples:
  deepinfer backends
  deepinfer backends --explain --backend reference --json backends.json
  deepinfer backends --explain --assume ascend950
  deepinfer backends --cost --set speculation.cost_table=costs.json --svg costs.svg
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `backends`."""
    parser = subparsers.add_parser(
        "backends",
        help="list backends: available, or the reason why not",
        description="List every installed backend: available, or the reasons why not.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="for each op, show the implementation that the chosen backend uses, and why",
    )
    parser.add_argument(
        "--assume",
        metavar="BACKEND",
        help="with --explain: show what this backend would use on its own device, which need not "
        "be here",
    )
    parser.add_argument(
        "--cost",
        action="store_true",
        help="measure what draft passes and verifications cost on the chosen backend with the "
        "chosen checkpoint, which dynamic speculation plans with",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="with --cost: also draw the costs")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run `backends`; the exit code.

    Raises:
        ConfigError: with `--explain` or `--cost`, the chosen backend is not installed; `--assume`
            or `--svg` alone; the checkpoint has no drafter.
        CapabilityError: with `--explain` or `--cost`, the chosen backend is not available, or the
            assumed one cannot tell without its device.
    """
    if args.assume is not None and not args.explain:
        raise ConfigError(f"--assume {args.assume} explains nothing by itself; add --explain")
    if args.svg is not None and not args.cost:
        raise ConfigError(f"--svg {args.svg} has nothing to draw; add --cost")
    config = resolve_config(args)

    from deepinfer.cli.console import stdout_console
    from deepinfer.cli.report import write_json
    from deepinfer.device.registry import list_backends

    infos = list_backends({config.backend.name: config.backend.options})
    console = stdout_console()
    _show_backends(console, infos, config.backend.name)
    choices: list[OpChoice] = []
    if args.explain:
        from deepinfer.device.explain import explain_assumed, explain_backend

        if args.assume is None:
            choices = explain_backend(config.backend.name, config.backend.options)
            _show_choices(console, choices, f"ops of {config.backend.name}")
        else:
            same = args.assume == config.backend.name
            choices = explain_assumed(args.assume, config.backend.options if same else {})
            _show_choices(console, choices, f"plan of {args.assume} (assumed, not run here)")
    costs: Mapping[str, object] | None = None
    if args.cost:
        from deepinfer.cli import backend_costs

        tables = backend_costs.measure(config)
        backend_costs.show(console, tables, config.backend.name)
        costs = backend_costs.figures(tables)
        if args.svg is not None:
            caption = f"{config.backend.name}, {config.numerics.value}, {platform.machine()}"
            args.svg.write_text(backend_costs.drawn(tables, caption), encoding="utf-8")
    if args.json is not None:
        figures = {**_to_json(infos, choices), "costs": costs}
        write_json(args.json, command="backends", figures=figures, config=config)
    return 0


def _show_backends(console: Console, infos: Sequence[BackendInfo], chosen: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="backends", title_justify="left")
    for heading in ("name", "available", "device", "distribution"):
        table.add_column(heading, overflow="fold")
    for info in infos:
        table.add_row(
            f"{'→' if info.name == chosen else ' '} {info.name}",
            Text("yes", "green") if info.available else Text("no", "yellow"),
            Text(info.probe.device if info.probe else ""),
            Text(info.distribution),
        )
    console.print(table)
    for info in infos:
        if not info.available:
            console.print(Text(f"{info.name} is not available:", "bold"))
            for reason in info.reasons:
                console.print(Text(f"  - {reason}"), soft_wrap=True)
    console.print(Text(f"Python {platform.python_version()}, torch {_torch_version()}", "dim"))


def _show_choices(console: Console, choices: Sequence[OpChoice], title: str) -> None:
    from rich.table import Table
    from rich.text import Text

    headings = ["op", "implementation", "reason"]
    if any(choice.layout for choice in choices):
        headings.append("layout")
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for choice in choices:
        cells = (choice.op, choice.implementation, choice.reason, choice.layout)
        table.add_row(*(Text(cell) for cell in cells[: len(headings)]))
    console.print(table)


def _to_json(infos: Sequence[BackendInfo], choices: Sequence[OpChoice]) -> Mapping[str, object]:
    backends = [
        {
            "name": info.name,
            "available": info.available,
            "reasons": list(info.reasons),
            "device": info.probe.device if info.probe else "",
            "distribution": info.distribution,
            "module": info.module,
            "seam_version": info.probe.seam_version if info.probe else None,
            "versions": dict(info.probe.versions) if info.probe else {},
        }
        for info in infos
    ]
    ops = [
        {
            "op": choice.op,
            "implementation": choice.implementation,
            "reason": choice.reason,
            "layout": choice.layout,
        }
        for choice in choices
    ]
    return {"backends": backends, "ops": ops}


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
