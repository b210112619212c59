"""Where each configuration value was set."""

from __future__ import annotations

from collections.abc import Mapping

# Dotted path of a value -> the file, environment variable or option that set it last.
Origins = Mapping[str, str]


def origin_of(origins: Origins, path: str) -> str | None:
    """Return where the value at a dotted path was set; None when that is not known.

    A path inside a value (`sampling.temperature`) and a section as a whole (`cache`) are looked
    up by the nearest path that was set.
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        origin = origins.get(".".join(parts[:length]))
        if origin is not None:
            return origin
    inside = {origin for name, origin in origins.items() if name.startswith(f"{path}.")}
    return ", ".join(sorted(inside)) or None


def origin_clause(origins: Origins, path: str) -> str:
    """Return " (from ORIGIN)" for a message, or nothing when the origin is not known."""
    origin = origin_of(origins, path)
    return f" (from {origin})" if origin else ""
