"""Options that commands share, and the configuration that they add up to."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.config import EngineConfig

# Dedicated options, each short for `--set PATH=VALUE`: attribute -> (option, path).
_SHORTCUTS = {
    "backend": ("--backend", "backend.name"),
    "checkpoint": ("--checkpoint", "checkpoint.path"),
    "numerics": ("--numerics", "numerics"),
}


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for configuration, report and messages to a command's parser."""
    config = parser.add_argument_group("configuration")
    config.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file or preset name such as tiny/reference; a later one overrides",
    )
    config.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="sets",
        help="one value of the configuration; overrides files and environment",
    )
    config.add_argument("--backend", metavar="NAME", help="short for --set backend.name=NAME")
    config.add_argument("--checkpoint", metavar="DIR", help="short for --set checkpoint.path=DIR")
    config.add_argument(
        "--numerics",
        metavar="MODE",
        help="exact or normative; short for --set numerics=MODE",
    )
    config.add_argument(
        "--show-config", action="store_true", help="print the resolved configuration and end"
    )
    output = parser.add_argument_group("report and messages")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures to a JSON file"
    )
    output.add_argument(
        "-v", "--verbose", action="count", default=0, help="log more; may be repeated"
    )
    output.add_argument("-q", "--quiet", action="count", default=0, help="log less; repeatable")
    output.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,  # keeps a --debug that was given before the command
        help="show where in the program an error was raised",
    )


def add_timeline_option(parser: argparse.ArgumentParser) -> None:
    """Add `--timeline` to the parser of a command that runs an engine."""
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write a trace of host and device (chrome://tracing, Perfetto, `deepinfer timeline "
        "plot`) and show the device's idle share",
    )


def add_drafts_option(parser: argparse.ArgumentParser) -> None:
    """Add `--drafts-svg` to the parser of a command that runs an engine."""
    parser.add_argument(
        "--drafts-svg",
        type=Path,
        metavar="FILE",
        help="with speculation: draw acceptance by place in the block, confidences beside what "
        "came of them, and drafts verified over time",
    )


def resolve_config(args: argparse.Namespace) -> EngineConfig:
    """Return the configuration that files, environment and options give.

    Args:
        args: parsed arguments of a command with the common options.
    Raises:
        ConfigError: something in them is unknown or not valid.
        SystemExit: `--show-config` was given; the configuration has been printed.
    """
    from deepinfer.config import Assignment, dump, load_config

    options = [
        Assignment(path, value, option)
        for name, (option, path) in _SHORTCUTS.items()
        if (value := getattr(args, name)) is not None
    ]
    config = load_config(args.config, args.sets, os.environ, options=options)
    if args.show_config:
        sys.stdout.write(dump(config))
        raise SystemExit(0)
    return config
