"""YAML of version 1.2: words stay words, and what is written reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config.yaml_text import parse_yaml, render_yaml
from deepinfer.device.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("null", None),
        ("", None),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("1e-3", 0.001),
        ("1.5", 1.5),
        (".inf", float("inf")),
        ("2024-01-01", "2024-01-01"),
        ("2GiB", "2GiB"),
        ("[1, off]", [1, "off"]),
    ],
)
def test_scalar(text: str, value: object) -> None:
    parsed = parse_yaml(text, "test")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["a: 1\na: 2", "{[1]: 2}", "!!python/name:os.system", "a: &x *y"])
def test_unsafe_or_ambiguous_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^test"):
        parse_yaml(text, "test")


def test_error_names_origin_line_and_column() -> None:
    with pytest.raises(ConfigError, match=r"^my\.yaml, line 2, column 1"):
        parse_yaml("a: 1\na: 2\n", "my.yaml")


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
)


@given(st.dictionaries(st.text(max_size=5), _SCALARS | st.lists(_SCALARS, max_size=3), max_size=4))
def test_rendered_values_read_back(value: dict[str, object]) -> None:
    assert parse_yaml(render_yaml(value), "test") == value
