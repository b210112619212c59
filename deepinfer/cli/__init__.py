"""The command line; importing it stays cheap, a command loads what it needs when it runs."""

from __future__ import annotations

from deepinfer.cli.main import main

__all__ = ["main"]
