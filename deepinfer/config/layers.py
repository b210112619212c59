"""Lays sources of configuration over each other and remembers which one set what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.device.errors import ConfigError


class LayerStack:
    """Nested values and the origin of each; a later layer wins key by key."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def add(self, layer: Mapping[Any, object], origin: str) -> None:
        """Lay a nested mapping over what is there.

        Raises:
            ConfigError: a key of the layer's upper levels is not text.
        """
        self._merge(self.values, layer, "", origin)

    def assign(self, path: str, value: object, origin: str) -> None:
        """Lay a single value, or a mapping, at a dotted path over what is there."""
        *parents, name = path.split(".")
        layer: dict[str, object] = {name: value}
        for parent in reversed(parents):
            layer = {parent: layer}
        self.add(layer, origin)

    def _merge(
        self, target: dict[Any, Any], layer: Mapping[Any, object], prefix: str, origin: str
    ) -> None:
        for key, value in layer.items():
            if not prefix and not isinstance(key, str):
                raise ConfigError(
                    f"key {key!r} in {origin} is no name; expected a section such as 'cache'; "
                    "correct the file"
                )
            path = f"{prefix}{key}"
            if isinstance(value, Mapping):
                below = target.get(key)
                if not isinstance(below, dict):
                    below = target[key] = {}
                    self._forget(path)
                    self.origins.update({} if value else {path: origin})
                self._merge(below, value, f"{path}.", origin)
            else:
                target[key] = value
                self._forget(path)
                self.origins[path] = origin

    def _forget(self, path: str) -> None:
        """Drop the origins of a value that is replaced as a whole."""
        stale = [name for name in self.origins if name == path or name.startswith(f"{path}.")]
        for name in stale:
            del self.origins[name]
