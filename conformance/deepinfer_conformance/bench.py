"""The backends of a run: the one under test and the reference, one of each per numerics mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend

Loader = Callable[[BackendConfig], Backend]


class Bench:
    """Creates backends when a case first asks for them."""

    def __init__(
        self,
        backend: str,
        options: Mapping[str, object] | None = None,
        *,
        load: Loader = load_backend,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            backend: name of the backend under test.
            options: its options.
            load: makes a backend of a configuration; tests put planted mistakes here.
        """
        self.backend_name = backend
        self.options = dict(options or {})
        self._load = load
        self._under_test: dict[Numerics, Backend] = {}
        self._reference: dict[Numerics, Backend] = {}
        self.recordings: dict[object, object] = {}
        """Runs of the reference that several cases look at, by whoever makes them."""

    def under_test(self, numerics: Numerics) -> Backend:
        """The backend under test.

        Raises:
            ConfigError, CapabilityError: it cannot be had here.
        """
        if numerics not in self._under_test:
            config = BackendConfig(self.backend_name, numerics, dict(self.options))
            self._under_test[numerics] = self._load(config)
        return self._under_test[numerics]

    def reference(self, numerics: Numerics) -> Backend:
        """The reference on the CPU; its streams run inline, so that an error shows its cause."""
        if numerics not in self._reference:
            config = BackendConfig("reference", numerics, {"runtime": "inline"})
            self._reference[numerics] = load_backend(config)
        return self._reference[numerics]

    def new_under_test(self, numerics: Numerics) -> Backend:
        """A backend under test of its own, for an engine that will close it."""
        return self._load(BackendConfig(self.backend_name, numerics, dict(self.options)))

    def new_reference(self, numerics: Numerics) -> Backend:
        """A reference of its own, for an engine that will close it."""
        return load_backend(BackendConfig("reference", numerics, {}))

    def features(self) -> frozenset[str]:
        """What the backend under test declares."""
        return self.under_test(Numerics.NORMATIVE).features

    def close(self) -> None:
        """Close every backend that was created."""
        for backend in (*self._under_test.values(), *self._reference.values()):
            backend.close()
        self._under_test.clear()
        self._reference.clear()
