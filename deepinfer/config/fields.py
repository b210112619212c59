"""The tree of configuration fields, walked by dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def section_class(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section class that a field holds, or None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def leaf_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every plain value of a model, depth first."""
    for name, field in model.model_fields.items():
        section = section_class(field)
        if section is None:
            yield prefix + name
        else:
            yield from leaf_paths(section, f"{prefix}{name}.")


def find_field(model: type[BaseModel], parts: Sequence[str]) -> tuple[str, FieldInfo | None]:
    """Return the path of the field that a location points at or into, and the field.

    Args:
        model: the root of the tree.
        parts: names from the root down; further parts inside a plain value are cut off.
    Returns:
        The dotted path and the field; the field is None where the path leaves the tree.
    """
    current: type[BaseModel] | None = model
    field: FieldInfo | None = None
    path: list[str] = []
    for part in parts:
        if current is None:
            break
        field = current.model_fields.get(part)
        path.append(part)
        if field is None:
            break
        current = section_class(field)
    return ".".join(path), field
