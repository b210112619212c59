"""The runtime protocol: streams, events, pinned memory, graphs, memory facts, collectives.

Order is kept by streams and events, never by waiting: `Stream.enqueue` returns before the work
is done, on every device, the CPU included.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


class StepKind(enum.Enum):
    """What a step computes; never mixed, and zero valid rows is legal in each."""

    PREFILL = "prefill"
    DECODE = "decode"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of the device, in bytes."""

    total_bytes: int
    free_bytes: int


class Event(Protocol):
    """A point in a stream's order."""

    def query(self) -> bool:
        """True when everything enqueued before the event has finished; never waits."""
        ...

    def synchronize(self) -> None:
        """Wait until the event has happened; raises what the stream's work raised."""
        ...

    @property
    def time_us(self) -> float:
        """When the event happened, in microseconds of the clock of `Runtime.now_us`.

        Raises:
            ContractError: it was recorded without `timed=True`, or has not happened yet.
        """
        ...


class Stream(Protocol):
    """An in-order queue of device work."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Issue `work` on this stream and return without waiting for it.

        The callable must only issue device work and touch tensors that outlive it; on the CPU
        it runs later, in the stream's own thread.

        Raises:
            DeviceMemoryError: issuing it found the device's memory full; a part may have been
                issued. The stream stays usable.
        """
        ...

    def record_event(self, *, timed: bool = False) -> Event:
        """An event after everything enqueued so far.

        With `timed` it can tell when it happened: on an idle stream, when it was recorded.
        """
        ...

    def wait_event(self, event: Event) -> None:
        """Let later work on this stream wait for `event`, without blocking the caller."""
        ...

    def synchronize(self) -> None:
        """Wait until the queue is empty; raises what the work raised."""
        ...


def run_on(stream: Stream, work: Callable[[], _Result]) -> _Result:
    """Run `work` on the stream, wait for it and return its result; for set-up, not for steps.

    Set-up belongs on the stream that computes the steps: on the CPU a thread that once ran a
    parallel loop keeps its own team of worker threads, and two teams on few cores slow every
    small op of both down.

    Raises:
        Exception: what `work` raised; the stream stays usable.
    """
    results: list[_Result] = []
    failures: list[Exception] = []

    def guarded() -> None:
        try:
            results.append(work())
        except Exception as error:
            failures.append(error)

    stream.enqueue(guarded)
    stream.record_event().synchronize()
    if failures:
        raise failures[0]
    return results[0]


class Graph(Protocol):
    """Captured work that can be issued again with the tensors it was captured with."""

    def replay(self) -> None:
        """Issue the captured work; call it inside `Stream.enqueue`."""
        ...


class ProcessGroup(Protocol):
    """Ranks that communicate; a group of one is always legal."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over ranks; with one rank, `values` itself."""
        ...

    def all_gather(self, values: Tensor) -> Tensor:
        """[size, ...] stacked values of all ranks."""
        ...

    def all_to_all(self, values: Tensor) -> Tensor:
        """values [size, ...]: entry i goes to rank i; returns [size, ...] by source rank."""
        ...

    def barrier(self) -> None:
        """Wait for every rank."""
        ...


class Runtime(Protocol):
    """Services of one device."""

    @property
    def device(self) -> torch.device: ...
    @property
    def compute_stream(self) -> Stream: ...
    @property
    def copy_stream(self) -> Stream:
        """Stream for host/device copies; may be the compute stream itself."""
        ...

    @property
    def device_group(self) -> ProcessGroup: ...
    @property
    def cpu_group(self) -> ProcessGroup: ...

    def new_stream(self, name: str) -> Stream:
        """A further stream; `name` shows in traces."""
        ...

    def now_us(self) -> float:
        """The host's time in microseconds from any origin, on the clock of timed events."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that the device can copy from and to asynchronously."""
        ...

    def generator(self, seed: int) -> torch.Generator:
        """A random generator on the device (weights of tests; sampling never uses it)."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture `work` for replay, after the compute stream's work; runs it at least once.

        Call it on the host, not inside `Stream.enqueue`.

        Raises:
            DeviceMemoryError: the device has no memory for it.
        """
        ...

    def memory(self) -> MemoryFacts:
        """What the device has in all and free now."""
        ...

    @property
    def poisons_released(self) -> bool:
        """True in a test mode in which released cache rows are to be overwritten with NaN."""
        ...

    def close(self) -> None:
        """Drain the streams and end their threads; further calls are errors."""
        ...
