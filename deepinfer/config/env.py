"""Every environment variable that the project reads, in one fixed table."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepinfer.device.errors import ConfigError

PREFIX = "DEEPINFER_"
LOG_LEVEL_VARIABLE = "DEEPINFER_LOG_LEVEL"
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class EnvVariable:
    """One variable: the configuration path that it sets, and how its text is read.

    `path` is None for a variable that no configuration field mirrors. `parse` raises ValueError
    for a text outside `expected` and returns None for a text that sets nothing.
    """

    name: str
    path: str | None
    parse: Callable[[str], object]
    expected: str


def _parse_text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("is not a whole number")
    return int(text)


def _parse_choice(choices: Mapping[str, object]) -> Callable[[str], object]:
    def parse(text: str) -> object:
        if text.lower() not in choices:
            raise ValueError("is not one of the choices")
        return choices[text.lower()]

    return parse


# Words are passed on as they are written in a file; the configuration checks them further.
VARIABLES = (
    EnvVariable("DEEPINFER_BACKEND", "backend.name", _parse_text, "the name of a backend"),
    EnvVariable("DEEPINFER_CHECKPOINT", "checkpoint.path", _parse_text, "a checkpoint directory"),
    EnvVariable(
        "DEEPINFER_NUMERICS",
        "numerics",
        _parse_choice({"exact": "exact", "normative": "normative"}),
        "exact or normative",
    ),
    EnvVariable(
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
        "replay.keep_tokens",
        _parse_count,
        "a number of tokens, for example 140",
    ),
    EnvVariable(
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
        "replay.mode",
        _parse_choice({"compact": "bounded"}),
        "compact",
    ),
    EnvVariable(
        "DEEPINFER_ENABLE_MTP_VARLEN",
        "speculation.mode",
        # 0 only says that the number of drafts does not vary: off and fixed both agree with that.
        _parse_choice({"1": "dynamic", "0": None}),
        "1 or 0",
    ),
    EnvVariable(
        "DEEPINFER_USE_NEXTN_DECODE",
        "speculation.max_drafts",
        _parse_count,
        "a number of draft tokens, for example 5",
    ),
    EnvVariable(
        LOG_LEVEL_VARIABLE,
        None,
        _parse_choice({name: logging.getLevelName(name.upper()) for name in _LOG_LEVELS}),
        "debug, info, warning or error",
    ),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def read_environment(env: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Return the configuration values that an environment sets.

    Args:
        env: variables by name; those outside the DEEPINFER_ prefix are left alone.
    Returns:
        Dotted path -> (value, name of the variable that sets it).
    Raises:
        ConfigError: a DEEPINFER_ variable is unknown, or its text cannot be read.
    """
    settings: dict[str, tuple[object, str]] = {}
    for name in sorted(name for name in env if name.startswith(PREFIX)):
        variable = _BY_NAME.get(name)
        if variable is None:
            raise ConfigError(_unknown(name))
        value = _parse(variable, env[name])
        if variable.path is not None and value is not None:
            settings[variable.path] = (value, name)
    return settings


def read_log_level(env: Mapping[str, str]) -> int | None:
    """Return the logging level that an environment asks for, None when it asks for none.

    Raises:
        ConfigError: the variable names no level.
    """
    text = env.get(LOG_LEVEL_VARIABLE)
    if text is None:
        return None
    level = _parse(_BY_NAME[LOG_LEVEL_VARIABLE], text)
    assert isinstance(level, int)
    return level


def _parse(variable: EnvVariable, text: str) -> object:
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"environment variable {variable.name} = {text!r} {error}; expected "
            f"{variable.expected}; correct it or unset it"
        ) from error


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.7)
    remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(_BY_NAME)}."
    return f"environment variable {name} is not known; {remedy} Correct it or unset it"
