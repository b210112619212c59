"""Prompts from the command line, a file or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from deepinfer.device.errors import RequestError

STDIN_NAME = "-"


def read_prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    """Return the prompts that a command was given, in order.

    Args:
        arguments: prompts on the command line; they come first.
        file: a file with a prompt on each line, "-" for standard input, None for no file.
            Without arguments and file, standard input is read unless it is a terminal.
    Raises:
        RequestError: there is no prompt, a prompt is not valid Unicode, or the file is unreadable.
    """
    prompts = list(arguments)
    if file is not None and file != STDIN_NAME:
        prompts += _read_file(Path(file))
    elif file == STDIN_NAME or (not prompts and not sys.stdin.isatty()):
        try:
            prompts += _split(sys.stdin)
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input: {error}; expected UTF-8 text") from error
    if not prompts:
        raise RequestError(
            "there is no prompt; give one as an argument, with --file, or on standard input"
        )
    for prompt in prompts:
        if not _is_unicode(prompt):
            raise RequestError(f"prompt {prompt!a} holds bytes that are not UTF-8; correct it")
    return prompts


def _read_file(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            return _split(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"--file {path}: cannot be read ({error}); expected a UTF-8 text file with a prompt "
            "on each line"
        ) from error


def _split(lines: Iterable[str]) -> list[str]:
    return [line.rstrip("\r\n") for line in lines if line.strip()]


def _is_unicode(prompt: str) -> bool:
    """Whether a prompt is text; undecodable bytes of the command line arrive as surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True
