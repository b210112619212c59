"""CUDA graphs: capture, replay, and the stand-in under the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaGraph:
    """A captured CUDA graph; the tensors that its work made or holds live as long as the graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
        self._graph = graph
        # A graph reads addresses. What the work alone refers to would be freed with it, and the
        # memory given back to the driver at the next capture.
        self._work = work

    def replay(self) -> None:
        """Issue the captured launches; call it inside `Stream.enqueue`."""
        self._graph.replay()


class GraphCapture:
    """Captures work of the compute stream on a stream of its own.

    CUDA captures on no default stream, and the compute stream is one. One stream and one memory
    pool serve all graphs: they are replayed one after the other, so they may share memory, and
    what a graph leaves is good until the next replay of any of them.
    """

    def __init__(self, compute: torch.cuda.Stream, device: torch.device) -> None:
        """Take a stream and an empty pool.

        Args:
            compute: the stream on which graphs will be replayed.
            device: its device.
        """
        self._compute = compute
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def idle_bytes(self) -> int:
        """Memory of the pool that no tensor has now; only later graphs can have it."""
        return sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["segment_pool_id"] == self._pool
        )

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        """Run `work` once, so that every kernel is compiled and loaded, then capture it.

        The run comes after everything issued on the compute stream and has ended when this
        returns. The tensors that `work` makes or refers to live as long as the graph; those it
        reads must stay where they are. Work that waits for the host cannot be captured.
        """
        self._stream.wait_stream(self._compute)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return CudaGraph(graph, work)


class RepeatedWork:
    """The interpreter has no graphs: a replay runs the callable again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.replay()

    def replay(self) -> None:
        """Run the work again."""
        with torch.no_grad():
            self._work()
