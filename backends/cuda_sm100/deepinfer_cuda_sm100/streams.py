"""Streams and events of a CUDA device, and their stand-ins under the interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepinfer.device.errors import ContractError, DeviceMemoryError
from deepinfer.device.runtime import Event


def host_time_us() -> float:
    """Microseconds of the process's performance counter."""
    return time.perf_counter_ns() / 1000


class DeviceClock:
    """Puts times of the device on the host's clock, by one event that both saw."""

    def __init__(self, device: torch.device) -> None:
        """Wait for the device once, so that the event happens when it is recorded."""
        torch.cuda.synchronize(device)
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.default_stream(device))
        self._origin.synchronize()
        self._origin_us = host_time_us()

    def time_us(self, event: torch.cuda.Event) -> float:
        """Host time of a timed event that has happened."""
        return self._origin_us + 1000.0 * float(self._origin.elapsed_time(event))


class CudaEvent:
    """A point in a CUDA stream's order."""

    def __init__(self, event: torch.cuda.Event, clock: DeviceClock | None) -> None:
        self.event = event
        self._clock = clock

    @property
    def time_us(self) -> float:
        """When the event happened, on the host's clock.

        Raises:
            ContractError: it was recorded without a time, or has not happened yet.
        """
        if self._clock is None:
            raise ContractError("time_us of an event recorded without a time; pass timed=True")
        if not self.event.query():
            raise ContractError("time_us of an event that has not happened; synchronize it first")
        return self._clock.time_us(self.event)

    def query(self) -> bool:
        """True when everything before the event has finished; never waits."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait for the event; raises the device's error if its work failed."""
        self.event.synchronize()


class CudaStream:
    """A CUDA stream: work is issued inside `enqueue` and runs on the device afterwards."""

    def __init__(self, name: str, stream: torch.cuda.Stream, clock: DeviceClock) -> None:
        self.name = name
        self.stream = stream
        self._clock = clock
        self._is_closed = False

    def enqueue(self, work: Callable[[], None]) -> None:
        """Issue `work` on this stream, without gradients; what issuing raises comes out here.

        Raises:
            DeviceMemoryError: torch found no memory for a tensor of it.
        """
        self._require_open()
        with torch.no_grad(), torch.cuda.stream(self.stream), refusing_full_device():
            work()

    def record_event(self, *, timed: bool = False) -> CudaEvent:
        """An event after everything issued so far; with `timed` it can tell when it happened."""
        self._require_open()
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self.stream)
        return CudaEvent(event, self._clock if timed else None)

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


@contextmanager
def refusing_full_device() -> Iterator[None]:
    """Torch's error of a full device becomes the engine's."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(str(error).partition("\n")[0]) from error


class HappenedEvent:
    """An event of the interpreting runtime, whose work is done when `enqueue` returns."""

    def __init__(self, recorded_us: float | None) -> None:
        self._recorded_us = recorded_us

    @property
    def time_us(self) -> float:
        """When it was recorded.

        Raises:
            ContractError: it was recorded without a time.
        """
        if self._recorded_us is None:
            raise ContractError("time_us of an event recorded without a time; pass timed=True")
        return self._recorded_us

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
        with torch.no_grad(), refusing_full_device():
            work()

    def record_event(self, *, timed: bool = False) -> HappenedEvent:
        """An event that has happened."""
        self._require_open()
        return HappenedEvent(host_time_us() if timed else None)

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
