"""Turns validation errors into sentences that name path, value, origin, expectation and remedy."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from deepinfer.config.fields import find_field, leaf_paths, section_class
from deepinfer.config.origins import Origins, origin_clause
from deepinfer.config.spelling import spell

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_MAX_NUM_SHOWN = 10


def explain_errors(model: type[BaseModel], error: ValidationError, origins: Origins) -> str:
    """Return a message with one line for each bad field.

    Args:
        model: the class that refused its values.
        error: what pydantic reports.
        origins: where each value was set; may be empty.
    """
    lines: dict[str, str] = {}
    for details in error.errors(include_url=False):
        path, line = _explain_one(model, details, origins)
        lines.setdefault(path, line)  # a field with several types reports once for each of them
    shown = list(lines.values())[:_MAX_NUM_SHOWN]
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more")
    return "\n".join(shown)


def _explain_one(
    model: type[BaseModel], details: ErrorDetails, origins: Origins
) -> tuple[str, str]:
    parts = [str(part) for part in details["loc"]]
    if details["type"] == "extra_forbidden":
        path = ".".join(parts)
        return path, explain_unknown_key(model, path, origins)
    path, field = find_field(model, parts)
    where = origin_clause(origins, path)
    problem = _problem(details)
    if field is None:
        return path, f"the configuration{where} {problem}"
    if details["type"] == "value_error" and isinstance(details["input"], dict):
        return path, f"{path}{where}: {problem}"  # the problem names the key inside
    if section_class(field) is None:
        return path, (
            f"{path} = {spell(details['input'])}{where} {problem}; expected "
            f"{field.description}; correct it, or leave it out for "
            f"{spell(field.get_default(call_default_factory=True))}"
        )
    return path, (
        f"{path} = {spell(details['input'])}{where} is not a section; expected its fields, such "
        f"as {next(leaf_paths(model_of(model, path), f'{path}.'))}"
    )


def model_of(model: type[BaseModel], path: str) -> type[BaseModel]:
    """Return the section class at a dotted path, or `model` itself for the empty path."""
    if not path:
        return model
    _, field = find_field(model, path.split("."))
    section = section_class(field) if field is not None else None
    return section or model


def _problem(details: ErrorDetails) -> str:
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    message = details["msg"]
    return "is not valid: " + message[0].lower() + message[1:]


def explain_unknown_key(model: type[BaseModel], path: str, origins: Origins) -> str:
    """Return a message for a key that no section has, with the nearest name there is.

    Args:
        model: the root of the configuration.
        path: dotted path of the unknown key.
        origins: where each value was set; may be empty.
    """
    parent, _, name = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    siblings = list(model_of(model, parent).model_fields)
    nearest = _nearest_paths(model, prefix, name, siblings)
    if nearest:
        remedy = "did you mean " + " or ".join(nearest) + "?"
    else:
        remedy = f"expected one of {', '.join(prefix + sibling for sibling in siblings)}"
    return f"{path}{origin_clause(origins, path)} is not a known key; {remedy}"


def _nearest_paths(
    model: type[BaseModel], prefix: str, name: str, siblings: list[str]
) -> list[str]:
    paths = list(leaf_paths(model))
    elsewhere = [path for path in paths if path.rpartition(".")[2] == name]
    if elsewhere:
        return elsewhere
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return [prefix + near[0]]
    return difflib.get_close_matches(prefix + name, paths, n=1)
