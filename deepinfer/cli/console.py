"""The one place through which commands write to the terminal."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@functools.cache
def stdout_console() -> Console:
    """Return the console for results."""
    from rich.console import Console

    return Console()


@functools.cache
def stderr_console() -> Console:
    """Return the console for progress, summaries and messages."""
    from rich.console import Console

    return Console(stderr=True)


def write_text(text: str) -> None:
    """Write generated text to standard output as it is, at once, without markup or wrapping.

    Characters that the terminal's encoding lacks are written as escapes.
    """
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
    sys.stdout.flush()
