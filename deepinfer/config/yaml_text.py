"""YAML as the configuration reads and writes it: the core schema of YAML 1.2.

PyYAML follows YAML 1.1, in which `off`, `yes` and `on` are booleans, `010` is eight and `1e-3` is
text. A configuration whose words include `off` cannot live with that.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from deepinfer.device.errors import ConfigError

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)

_RARE_LINE_ENDS = frozenset("\r\x85\u2028\u2029")


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2, and without duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _CoreDumper(yaml.SafeDumper):
    """SafeDumper that quotes text which YAML 1.1 or 1.2 readers would take for something else."""


for _handler in (_CoreLoader, _CoreDumper):
    # Order matters: a whole number also matches the pattern of a float.
    _handler.add_implicit_resolver(
        "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
    )
    _handler.add_implicit_resolver(
        "tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]
    )
    _handler.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(f"^(?:{_INT.pattern})$"), list("-+0123456789")
    )
    _handler.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789")
    )


def _construct_int(loader: _CoreLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if not _INT.fullmatch(text):
        raise yaml.constructor.ConstructorError(None, None, f"{text!r} is no int", node.start_mark)
    return int(text, 0) if text.startswith(("0x", "0o")) else int(text)


def _construct_float(loader: _CoreLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    if not _FLOAT.fullmatch(text):
        raise yaml.constructor.ConstructorError(
            None, None, f"{text!r} is no float", node.start_mark
        )
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _construct_mapping(loader: _CoreLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable) or key in values:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} appears twice or cannot be a key", key_node.start_mark
            )
        values[key] = loader.construct_object(value_node, deep=True)
    return values


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_CoreLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_CoreLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _represent_text(dumper: _CoreDumper, text: str) -> yaml.ScalarNode:
    # PyYAML would write rare line ends as they are in other styles, and read them back as blanks.
    style = '"' if _RARE_LINE_ENDS.intersection(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_CoreDumper.add_representer(str, _represent_text)


def parse_yaml(text: str, origin: str) -> Any:  # noqa: ANN401  (whatever the text holds)
    """Return the value that a YAML text holds; None for an empty text.

    Args:
        text: one YAML document.
        origin: the file or option that the text comes from, for messages.
    Raises:
        ConfigError: the text is not YAML, or has a key twice.
    """
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{origin}{where}: {error.problem or error.context}; expected YAML; correct the text"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: {error}; expected YAML; correct the text") from error


def render_yaml(value: object) -> str:
    """Return a value made of mappings, lists and scalars as YAML that `parse_yaml` reads back."""
    return yaml.dump(
        value, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
