"""Builds a configuration from files, environment and command line."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.config.engine_config import EngineConfig
from deepinfer.config.env import read_environment
from deepinfer.config.layers import LayerStack
from deepinfer.config.presets import find_preset
from deepinfer.config.yaml_text import parse_yaml, render_yaml
from deepinfer.device.errors import ConfigError

_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value for one dotted path, and the option that gave it."""

    path: str
    value: object
    origin: str


def parse_assignment(text: str) -> Assignment:
    """Return what a `--set` argument assigns.

    Args:
        text: "a.b=value"; the value is a YAML scalar, list or mapping; nothing means null.
    Raises:
        ConfigError: there is no "=", the path is malformed, or the value is not YAML.
    """
    path, equals, value = text.partition("=")
    origin = f"--set {text}"
    if not equals or not _PATH.fullmatch(path):
        raise ConfigError(
            f"{origin}: is no assignment; expected a path, '=' and a value, for example "
            "--set cache.block_size=64"
        )
    return Assignment(path, parse_yaml(value, origin), origin)


def load_config(
    files: Sequence[Path | str] = (),
    sets: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    options: Sequence[Assignment] = (),
) -> EngineConfig:
    """Return the configuration that several sources give together.

    Args:
        files: paths or preset names; a later file overrides an earlier one, key by key.
        sets: assignments "a.b=c", which override the environment.
        env: environment variables, which override the files; None reads none.
        options: assignments of dedicated options such as `--backend`, applied last.
    Raises:
        ConfigError: a source cannot be read, a key is unknown, or a value is not valid or not
            available in this version; the message names the path and the source.
    """
    stack = LayerStack()
    for name in files:
        path = find_preset(name)
        stack.add(_read_file(path), str(path))
    for dotted, (value, variable) in read_environment(env or {}).items():
        stack.assign(dotted, value, f"environment variable {variable}")
    for assignment in [*map(parse_assignment, sets), *options]:
        stack.assign(assignment.path, assignment.value, assignment.origin)
    return EngineConfig.model_validate(stack.values, context=stack.origins)


def override(config: EngineConfig, changes: Mapping[str, object]) -> EngineConfig:
    """Return a configuration with some values replaced.

    Args:
        config: what to start from; it stays as it is.
        changes: section or dotted path -> value; mappings are merged key by key.
    Raises:
        ConfigError: a key is unknown or a value is not valid.
    """
    stack = LayerStack()
    stack.add(config.model_dump(), "the configuration given")
    for path, value in changes.items():
        stack.assign(path, value, f"argument {path}")
    return EngineConfig.model_validate(stack.values, context=stack.origins)


def dump(config: EngineConfig) -> str:
    """Return every value of a configuration as YAML that `load_config` reads back."""
    return render_yaml(_plain(config.model_dump()))


def _plain(value: object) -> object:
    """Return a value with enums and paths as text; keys keep their types, as JSON's could not."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _read_file(path: Path) -> Mapping[object, object]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected UTF-8 YAML") from error
    values = parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{path}: holds a {type(values).__name__}; expected sections such as 'cache:'; "
            "correct the file"
        )
    if "text_config" in values or "num_hidden_layers" in values:
        raise ConfigError(
            f"{path}: describes a model (a checkpoint's config.json); expected the configuration "
            "of an engine; set checkpoint.path to the checkpoint's directory instead"
        )
    return values
