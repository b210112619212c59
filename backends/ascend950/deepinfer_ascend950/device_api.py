"""The part of `torch.npu` that the runtime uses.

Source: torch_npu 2.13, torch_npu/npu: streams.py, graphs.py, memory.py; it mirrors torch.cuda.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """torch.npu.Event."""

    def record(self, stream: DeviceStream) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float:  # noqa: ANN401
        """Milliseconds to another event; both were made with timing and have happened."""
        ...


class DeviceStream(Protocol):
    """torch.npu.Stream."""

    def wait_event(self, event: DeviceEvent) -> None: ...
    def synchronize(self) -> None: ...


class DeviceGraph(Protocol):
    """torch.npu.NPUGraph after capture."""

    def replay(self) -> None: ...


class DeviceApi(Protocol):
    """Services of one NPU."""

    @property
    def device(self) -> torch.device: ...
    def new_stream(self) -> DeviceStream: ...
    def new_event(self, *, timed: bool) -> DeviceEvent: ...
    def on_stream(self, stream: DeviceStream) -> AbstractContextManager[object]: ...
    def capture(self, stream: DeviceStream, work: Callable[[], None]) -> DeviceGraph: ...
    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...
    def generator(self) -> torch.Generator: ...
    def free_and_total_bytes(self) -> tuple[int, int]: ...


class TorchNpu:
    """`torch.npu` of the installed torch_npu. Written from its sources; never run by us."""

    def __init__(self, index: int) -> None:
        """Bind to NPU `index` and turn HF32 off, so that fp32 products stay fp32."""
        importlib.import_module("torch_npu")  # registers torch.npu and the npu operators

        self._npu = torch.npu  # type: ignore[attr-defined]
        self._device = torch.device("npu", index)
        self._npu.set_device(self._device)
        self._npu.matmul.allow_hf32 = False
        self._npu.conv.allow_hf32 = False

    @property
    def device(self) -> torch.device:
        return self._device

    def new_stream(self) -> DeviceStream:
        return cast("DeviceStream", self._npu.Stream(device=self._device))

    def new_event(self, *, timed: bool) -> DeviceEvent:
        return cast("DeviceEvent", self._npu.Event(enable_timing=timed))

    def on_stream(self, stream: DeviceStream) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", self._npu.stream(stream))

    def capture(self, stream: DeviceStream, work: Callable[[], None]) -> DeviceGraph:
        """Run `work` once to warm up, then record it."""
        with self._npu.stream(stream):
            work()
        stream.synchronize()
        graph = self._npu.NPUGraph()
        with self._npu.graph(graph, stream=stream):
            work()
        return cast("DeviceGraph", graph)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def generator(self) -> torch.Generator:
        return torch.Generator(device=self._device)

    def free_and_total_bytes(self) -> tuple[int, int]:
        free, total = self._npu.mem_get_info(self._device)
        return int(free), int(total)
