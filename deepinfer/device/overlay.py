"""A backend seen through another op table: checked, recording, or with one op replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from deepinfer.device.op import OpTable

if TYPE_CHECKING:
    from deepinfer.device.backend import Backend


class _Overlay:
    """Everything but the op table is the backend's own."""

    def __init__(self, backend: Backend, ops: OpTable) -> None:
        self._backend = backend
        self.ops = ops

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)


def with_ops(backend: Backend, ops: OpTable) -> Backend:
    """`backend` with its op table replaced; runtime, packing and caches stay its own."""
    return cast("Backend", _Overlay(backend, ops))


def checked(backend: Backend) -> Backend:
    """`backend` with ops that refuse calls outside their contracts; see `OpTable.checked`."""
    return with_ops(backend, backend.ops.checked())
