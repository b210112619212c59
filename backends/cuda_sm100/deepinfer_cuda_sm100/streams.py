"""Streams, events and graphs of a CUDA device, and their stand-ins under the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepinfer.device.errors import ContractError
from deepinfer.device.runtime import Event


class CudaEvent:
    """A point in a CUDA stream's order."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        """True when everything before the event has finished; never waits."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait for the event; raises the device's error if its work failed."""
        self.event.synchronize()


class CudaStream:
    """A CUDA stream: work is issued inside `enqueue` and runs on the device afterwards."""

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self.name = name
        self.stream = stream
        self._is_closed = False

    def enqueue(self, work: Callable[[], None]) -> None:
        """Issue `work` on this stream, without gradients; what issuing raises comes out here."""
        self._require_open()
        with torch.no_grad(), torch.cuda.stream(self.stream):
            work()

    def record_event(self) -> CudaEvent:
        """An event after everything issued so far."""
        self._require_open()
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(event)

    def wait_event(self, event: Event) -> None:
        """Let later work wait for `event`; an event of another runtime is waited for here."""
        self._require_open()
        if isinstance(event, CudaEvent):
            self.stream.wait_event(event.event)
        else:
            event.synchronize()

    def synchronize(self) -> None:
        """Wait until the stream is empty."""
        self._require_open()
        self.stream.synchronize()

    def close(self) -> None:
        """Wait for the work and refuse further calls."""
        if not self._is_closed:
            self.stream.synchronize()
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise ContractError(
                f"stream {self.name!r} is closed and takes no calls; create a new runtime"
            )


class CudaGraph:
    """A captured CUDA graph; the tensors that the work made live as long as the graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        """Issue the captured launches; call it inside `Stream.enqueue`."""
        self._graph.replay()


class HappenedEvent:
    """An event of the interpreting runtime, whose work is done when `enqueue` returns."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class InterpretedStream:
    """Runs work inside `enqueue`, on the CPU."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_closed = False

    def enqueue(self, work: Callable[[], None]) -> None:
        """Run `work` now, without gradients."""
        self._require_open()
        with torch.no_grad():
            work()

    def record_event(self) -> HappenedEvent:
        """An event that has happened."""
        self._require_open()
        return HappenedEvent()

    def wait_event(self, event: Event) -> None:
        """Wait for `event` here."""
        self._require_open()
        event.synchronize()

    def synchronize(self) -> None:
        """Return at once."""
        self._require_open()

    def close(self) -> None:
        """Refuse further calls."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise ContractError(
                f"stream {self.name!r} is closed and takes no calls; create a new runtime"
            )


class RepeatedWork:
    """The interpreter has no graphs: a replay runs the callable again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.replay()

    def replay(self) -> None:
        """Run the work again."""
        with torch.no_grad():
            self._work()
