"""The runtime: one CUDA device, or the CPU under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from deepinfer.device.errors import CapabilityError, ContractError
from deepinfer.device.runtime import MemoryFacts
from deepinfer_cuda_sm100.graphs import CudaGraph, GraphCapture, RepeatedWork
from deepinfer_cuda_sm100.groups import OneRank
from deepinfer_cuda_sm100.options import CudaOptions
from deepinfer_cuda_sm100.streams import (
    CudaStream,
    DeviceClock,
    InterpretedStream,
    host_time_us,
    refusing_full_device,
)

_INTERPRETED_BYTES = 1 << 30
"""Memory that the interpreting runtime says it has: enough for what it can finish."""


class CudaRuntime:
    """Streams, events, pinned memory and graphs of one GPU."""

    def __init__(self, options: CudaOptions) -> None:
        """Open the device; full fp32 products, whatever torch's defaults say.

        Raises:
            CapabilityError: there is no such device.
        """
        self._interprets = options.interpret
        self._poisons = options.poison_released
        if options.interpret:
            self._device = torch.device("cpu")
        else:
            count = torch.cuda.device_count()
            if options.device_index >= count:
                raise CapabilityError(
                    f"backend.options.device_index is {options.device_index}, torch sees {count} "
                    "CUDA device(s); choose a lower number, or backend.options.interpret=true to "
                    "check the kernels on a CPU"
                )
            self._device = torch.device("cuda", options.device_index)
            torch.cuda.set_device(self._device)
            torch.backends.cuda.matmul.allow_tf32 = False
        self._is_closed = False
        self._streams: list[CudaStream | InterpretedStream] = []
        self._group = OneRank()
        self._clock = None if options.interpret else DeviceClock(self._device)
        # The stream that packs weights and makes caches computes too, so that order is enough.
        self._compute_stream = self._add(
            InterpretedStream("compute")
            if self._clock is None
            else CudaStream("compute", torch.cuda.default_stream(self._device), self._clock)
        )
        self._copy_stream = self.new_stream("copy")
        self._graphs = (
            None
            if options.interpret
            else GraphCapture(torch.cuda.default_stream(self._device), self._device)
        )

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU under the interpreter."""
        return self._device

    @property
    def interprets(self) -> bool:
        """Whether kernels run in Triton's interpreter."""
        return self._interprets

    @property
    def compute_stream(self) -> CudaStream | InterpretedStream:
        """Stream for the model's work."""
        return self._compute_stream

    @property
    def copy_stream(self) -> CudaStream | InterpretedStream:
        """Stream for copies between host and device."""
        return self._copy_stream

    @property
    def device_group(self) -> OneRank:
        """The group of one."""
        return self._group

    @property
    def cpu_group(self) -> OneRank:
        """The group of one."""
        return self._group

    @property
    def poisons_released(self) -> bool:
        """`backend.options.poison_released`."""
        return self._poisons

    def new_stream(self, name: str) -> CudaStream | InterpretedStream:
        """A further stream; it is closed with the runtime."""
        self._require_open("new_stream")
        if self._clock is None:
            return self._add(InterpretedStream(name))
        return self._add(CudaStream(name, torch.cuda.Stream(self._device), self._clock))

    def _add(self, stream: CudaStream | InterpretedStream) -> CudaStream | InterpretedStream:
        self._streams.append(stream)
        return stream

    def now_us(self) -> float:
        """Time of the process's performance counter, the clock of timed events."""
        return host_time_us()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised page-locked host memory; ordinary memory under the interpreter."""
        self._require_open("pinned")
        return torch.empty(shape, dtype=dtype, pin_memory=not self._interprets)

    def generator(self, seed: int) -> torch.Generator:
        """A generator on the device."""
        self._require_open("generator")
        return torch.Generator(device=self._device).manual_seed(seed)

    def capture(self, work: Callable[[], None]) -> CudaGraph | RepeatedWork:
        """Run `work` once, then capture it; see `GraphCapture`.

        Raises:
            DeviceMemoryError: torch found no memory for a tensor of it.
        """
        self._require_open("capture")
        if self._graphs is None:
            return RepeatedWork(work)
        with refusing_full_device():
            return self._graphs.capture(work)

    def memory(self) -> MemoryFacts:
        """Memory of the device; what torch has cached and does not use counts as free.

        What it has cached for graphs does not: nothing else can have that.
        """
        self._require_open("memory")
        if self._interprets:
            return MemoryFacts(_INTERPRETED_BYTES, _INTERPRETED_BYTES)
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        if self._graphs is not None:
            cached -= self._graphs.idle_bytes
        return MemoryFacts(total_bytes=total, free_bytes=free + cached)

    def close(self) -> None:
        """Drain the streams; a second call does nothing."""
        self._is_closed = True
        with ExitStack() as stack:
            for stream in self._streams:
                stack.callback(stream.close)
            self._streams = []

    def _require_open(self, call: str) -> None:
        if self._is_closed:
            raise ContractError(f"{call}: the CUDA runtime is closed; create a new one")
