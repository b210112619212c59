"""The command `deepinfer backend new NAME`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepinfer_conformance.new_backend import write_backend

_EPILOG = """\
Afterwards: pip install -e deepinfer-mychip, then
deepinfer conformance --backend mychip --report build/mychip

example:
  deepinfer backend new mychip
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's parser."""
    parser = subparsers.add_parser("backend", help="write a package to start a backend from")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new",
        help="write a minimal package that runs the suite at once",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument("name", metavar="NAME", help="what backend.name will select, e.g. mychip")
    new.add_argument(
        "--dir", type=Path, metavar="FOLDER", help="where to write it (default: deepinfer-NAME)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the package and say what to do next."""
    folder: Path = args.dir or Path(f"deepinfer-{args.name}")
    for path in write_backend(args.name, folder):
        sys.stdout.write(f"wrote {path}\n")
    sys.stdout.write(
        f"next:\n  pip install -e {folder}\n"
        f"  deepinfer conformance --backend {args.name} --report build/{args.name}\n"
    )
    return 0
