"""Graph capture against a double of torch.cuda that keeps CUDA's rules and takes notes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from deepinfer.device.errors import DeviceMemoryError
from deepinfer.device.runtime import MemoryFacts
from deepinfer_cuda_sm100.graphs import CudaGraph, GraphCapture, RepeatedWork
from deepinfer_cuda_sm100.options import CudaOptions
from deepinfer_cuda_sm100.runtime import CudaRuntime


class Stream:
    """A stream that notes waits."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for {self.name}")


class Cuda:
    """The part of torch.cuda that capture uses; capturing on the default stream is an error."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_streams = 0
        self.default = self.current = Stream(self, "default")
        self.capturing: object = None

    def make_stream(self, device: torch.device) -> Stream:
        self.num_streams += 1
        return Stream(self, f"side {self.num_streams}")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: Stream) -> Iterator[None]:
        if stream is self.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.log.append(f"capture on {stream.name} into {pool}")
        self.capturing = graph
        with self.stream(stream):
            yield
        self.capturing = None

    def make_graph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.log.append(f"replay on {self.current.name}"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    double = Cuda()
    for name, value in {
        "Stream": double.make_stream,
        "stream": double.stream,
        "graph": double.graph,
        "CUDAGraph": double.make_graph,
        "graph_pool_handle": lambda: "the pool",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return double


def test_work_warms_up_and_is_captured_on_a_stream_of_its_own(cuda: Cuda) -> None:
    capture = GraphCapture(cuda.default, torch.device("cuda", 0))  # type: ignore[arg-type]

    def work() -> None:
        how = "captured" if cuda.capturing else "run"
        cuda.log.append(f"{how} on {cuda.current.name}")

    graph = capture.capture(work)
    assert cuda.log == [
        "side 1 waits for default",
        "run on side 1",
        "host waits for side 1",
        "capture on side 1 into the pool",
        "captured on side 1",
    ]
    graph.replay()
    assert cuda.log[-1] == "replay on default"


def test_all_graphs_share_stream_and_pool(cuda: Cuda) -> None:
    capture = GraphCapture(cuda.default, torch.device("cuda", 0))  # type: ignore[arg-type]
    capture.capture(lambda: None)
    capture.capture(lambda: None)
    assert cuda.log.count("capture on side 1 into the pool") == 2


def test_work_is_captured_without_gradients(cuda: Cuda) -> None:
    seen: list[bool] = []
    capture = GraphCapture(cuda.default, torch.device("cuda", 0))  # type: ignore[arg-type]
    capture.capture(lambda: seen.append(torch.is_grad_enabled()))
    assert seen == [False, False]


def test_what_only_the_work_refers_to_lives_as_long_as_the_graph(cuda: Cuda) -> None:
    """The fault of a GPU run: a graph went on reading a tensor that was freed after capture."""
    capture = GraphCapture(cuda.default, torch.device("cuda", 0))  # type: ignore[arg-type]

    def captured() -> tuple[CudaGraph, weakref.ref[torch.Tensor]]:
        read = torch.ones(3)
        return capture.capture(lambda: cuda.log.append(str(read.sum()))), weakref.ref(read)

    graph, read = captured()
    gc.collect()
    assert read() is not None
    del graph
    gc.collect()
    assert read() is None


def test_idle_memory_of_the_pool_is_not_free(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"segment_pool_id": pool, "total_size": total, "allocated_size": allocated}
        for pool, total, allocated in [((0, 0), 400, 100), ("the pool", 50, 20), ("other", 9, 2)]
    ]
    for name, value in {
        "memory_snapshot": lambda: segments,
        "mem_get_info": lambda device: (1000, 9000),
        "memory_reserved": lambda device: 459,
        "memory_allocated": lambda device: 122,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    runtime = CudaRuntime(CudaOptions(interpret=True))
    capture = GraphCapture(cuda.default, torch.device("cuda", 0))  # type: ignore[arg-type]
    monkeypatch.setattr(runtime, "_graphs", capture)
    monkeypatch.setattr(runtime, "_interprets", False)
    assert runtime.memory() == MemoryFacts(9000, 1000 + 337 - 30)
    runtime.close()


def test_interpreting_runtime_repeats_the_work() -> None:
    runtime = CudaRuntime(CudaOptions(interpret=True))
    runs: list[int] = []
    graph = runtime.capture(lambda: runs.append(1))
    assert isinstance(graph, RepeatedWork)
    graph.replay()
    assert len(runs) == 2
    runtime.close()


def test_a_full_device_while_capturing_is_told_in_the_engines_words(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = CudaRuntime(CudaOptions(interpret=True))
    capture = GraphCapture(cuda.default, torch.device("cuda", 0))  # type: ignore[arg-type]
    monkeypatch.setattr(runtime, "_graphs", capture)

    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the docs")

    with pytest.raises(DeviceMemoryError, match=r"Tried to allocate 2 GiB\.$"):
        runtime.capture(work)
    runtime.close()
