"""Streams, events, graphs and memory of one NPU, behind the seam's protocols."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.runtime import Event, MemoryFacts
from deepinfer_ascend950.device_api import DeviceApi, DeviceEvent, DeviceGraph, DeviceStream
from deepinfer_ascend950.groups import SingleGroup


def host_time_us() -> float:
    """Time of the process's performance counter."""
    return 1e6 * time.perf_counter()


class DeviceClock:
    """Times of events on the host's clock: an event of the start is read on both."""

    def __init__(self, api: DeviceApi, stream: DeviceStream) -> None:
        """Wait for an event on the idle stream and read the host's clock there."""
        self._start = api.new_event(timed=True)
        self._start.record(stream)
        self._start.synchronize()
        self._start_us = host_time_us()

    def time_us(self, event: DeviceEvent) -> float:
        """When a timed event happened; it is off by as long as the host took to see the start."""
        return self._start_us + 1e3 * self._start.elapsed_time(event)


class NpuEvent:
    """A point in a stream's order."""

    def __init__(self, raw: DeviceEvent, clock: DeviceClock | None = None) -> None:
        """Without a clock the event has no time."""
        self.raw = raw
        self._clock = clock

    def query(self) -> bool:
        return self.raw.query()

    def synchronize(self) -> None:
        self.raw.synchronize()

    @property
    def time_us(self) -> float:
        """When the event happened, on the clock of `NpuRuntime.now_us`.

        Raises:
            ContractError: it was recorded without `timed=True`, or has not happened yet.
        """
        if self._clock is None:
            raise ContractError("the event has no time; record it with timed=True")
        if not self.query():
            raise ContractError("the event has not happened yet; wait for it, then read its time")
        return self._clock.time_us(self.raw)


class NpuStream:
    """An in-order queue of device work; what the host does wrong is raised by `enqueue`."""

    def __init__(self, name: str, api: DeviceApi) -> None:
        self.name = name
        self._api = api
        self._raw = api.new_stream()
        self._clock: DeviceClock | None = None
        self._is_closed = False

    def enqueue(self, work: Callable[[], None]) -> None:
        self._require_open()
        with torch.no_grad(), self._api.on_stream(self._raw):
            work()

    def record_event(self, *, timed: bool = False) -> NpuEvent:
        """An event after everything enqueued so far; with `timed` it can tell when it happened."""
        self._require_open()
        if timed and self._clock is None:
            self._clock = DeviceClock(self._api, self._api.new_stream())
        event = self._api.new_event(timed=timed)
        event.record(self._raw)
        return NpuEvent(event, self._clock if timed else None)

    def wait_event(self, event: Event) -> None:
        """Let later work wait for `event`.

        Raises:
            ContractError: another backend made the event.
        """
        self._require_open()
        if not isinstance(event, NpuEvent):
            raise ContractError(
                f"stream {self.name!r} of ascend950 was given an event of type "
                f"{type(event).__name__}; events belong to the backend that made them"
            )
        self._raw.wait_event(event.raw)

    def synchronize(self) -> None:
        self._require_open()
        self._raw.synchronize()

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """Captured work of this stream."""
        self._require_open()
        with torch.no_grad():
            return self._api.capture(self._raw, work)

    def close(self) -> None:
        """Drain the stream; a second call does nothing."""
        if not self._is_closed:
            self._raw.synchronize()
            self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise ContractError(
                f"stream {self.name!r} is closed and takes no calls; create a new runtime"
            )


class NpuRuntime:
    """Runtime over one device, real or emulated."""

    def __init__(self, api: DeviceApi) -> None:
        self._api = api
        self._is_closed = False
        self._streams: list[NpuStream] = []
        self._group = SingleGroup()
        self._compute_stream = self.new_stream("compute")
        self._copy_stream = self.new_stream("copy")

    @property
    def device(self) -> torch.device:
        return self._api.device

    @property
    def compute_stream(self) -> NpuStream:
        return self._compute_stream

    @property
    def copy_stream(self) -> NpuStream:
        return self._copy_stream

    @property
    def device_group(self) -> SingleGroup:
        return self._group

    @property
    def cpu_group(self) -> SingleGroup:
        return self._group

    @property
    def poisons_released(self) -> bool:
        return False

    def now_us(self) -> float:
        """The host's time, on the clock of timed events."""
        return host_time_us()

    def new_stream(self, name: str) -> NpuStream:
        self._require_open("new_stream")
        stream = NpuStream(name, self._api)
        self._streams.append(stream)
        return stream

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._require_open("pinned")
        return self._api.pinned(shape, dtype)

    def generator(self, seed: int) -> torch.Generator:
        self._require_open("generator")
        return self._api.generator().manual_seed(seed)

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """Capture `work` after all work of the compute stream; it runs at least once."""
        self._require_open("capture")
        self._compute_stream.synchronize()
        return self._compute_stream.capture(work)

    def memory(self) -> MemoryFacts:
        self._require_open("memory")
        free, total = self._api.free_and_total_bytes()
        return MemoryFacts(total_bytes=total, free_bytes=free)

    def close(self) -> None:
        self._is_closed = True
        for stream in self._streams:
            stream.close()

    def _require_open(self, call: str) -> None:
        if self._is_closed:
            raise ContractError(f"{call}: the ascend950 runtime is closed; create a new backend")
