"""An NPU's services on the CPU: work is done when it is issued, and every event has happened.

Page: torch_npu 2.13, torch_npu/npu/streams.py and graphs.py. A device that lags behind is not
emulated, so a missing wait does not show here; the reference backend's adversarial mode shows it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from deepinfer_ascend950.device_api import DeviceEvent, DeviceGraph, DeviceStream


class EmulatedEvent:
    """An event; querying one that was never recorded is an error, as no device promises it."""

    def __init__(self, *, timed: bool) -> None:
        self._is_recorded, self._is_timed = False, timed
        self._time_ms = 0.0

    def record(self, stream: DeviceStream) -> None:
        self._is_recorded, self._time_ms = True, 1e3 * time.perf_counter()

    def query(self) -> bool:
        assert self._is_recorded, "the event was never recorded"
        return True

    def synchronize(self) -> None:
        assert self._is_recorded, "the event was never recorded"

    def elapsed_time(self, end: EmulatedEvent) -> float:
        assert self._is_timed, "the event was made without timing"
        assert end._is_timed, "the event was made without timing"
        return end._time_ms - self._time_ms


class EmulatedStream:
    """A stream that is always empty."""

    def wait_event(self, event: DeviceEvent) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        return


class EmulatedGraph:
    """Captured work; a replay runs the Python code again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


class EmulatedDevice:
    """The CPU in the place of an NPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def new_stream(self) -> DeviceStream:
        return EmulatedStream()

    def new_event(self, *, timed: bool) -> DeviceEvent:
        return EmulatedEvent(timed=timed)

    def on_stream(self, stream: DeviceStream) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, stream: DeviceStream, work: Callable[[], None]) -> DeviceGraph:
        work()
        return EmulatedGraph(work)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def generator(self) -> torch.Generator:
        return torch.Generator(device="cpu")

    def free_and_total_bytes(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
