"""Logging set-up of the command line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

_OWN_PREFIX = "deepinfer"
_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
_NORMAL = _LEVELS.index(logging.INFO)


class _OwnOrSerious(logging.Filter):
    """Lets our records through, and of other packages only warnings and worse."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.startswith(_OWN_PREFIX) or record.levelno >= logging.WARNING


class _CommandHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records to the standard error of the moment; a class of its own to be found by."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self.addFilter(_OwnOrSerious())


def configure_logging(*, verbosity: int, env: Mapping[str, str]) -> None:
    """Send log records to standard error, at the level that is asked for.

    Args:
        verbosity: number of -v less number of -q; 0 leaves the level to the environment, and
            without a variable there to INFO.
        env: environment variables by name.
    Raises:
        ConfigError: the variable for the level names none.
    """
    from deepinfer.config.env import read_log_level

    env_level = read_log_level(env)
    level = _LEVELS[min(max(_NORMAL + verbosity, 0), len(_LEVELS) - 1)]
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _CommandHandler)]:
        root.removeHandler(handler)
    root.addHandler(_CommandHandler())
    root.setLevel(level if verbosity or env_level is None else env_level)
