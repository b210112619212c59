"""Training batches made by worker processes ahead of time."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized

from deepinfer_training.sequences import Batch, SequenceSource, Split

_CHUNK_TOKENS = 8192


def _work(
    source: SequenceSource,
    seed: int,
    worker: int,
    num_workers: int,
    shared: tuple[Synchronized[int], Synchronized[int], Queue[tuple[int, Batch]]],
) -> None:
    """Fill the queue until told to stop or until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    length_now, stopped, chunks = shared
    parent, index = os.getppid(), worker
    try:
        while not stopped.value and os.getppid() == parent:
            length = length_now.value
            rows = max(1, _CHUNK_TOKENS // length)
            made = [source.sequence(Split.TRAIN, seed, index + i * num_workers, length)
                    for i in range(rows)]  # fmt: skip
            index += rows * num_workers
            chunk = (length, Batch.join(made))
            while not stopped.value and length_now.value == length and os.getppid() == parent:
                try:
                    chunks.put(chunk, timeout=1.0)
                    break
                except queue.Full:
                    continue
    except Exception:  # a worker has no caller: show the cause, the parent notices the silence
        traceback.print_exc()


class Loader:
    """Batches of the training split. Start it before a GPU is touched: workers are forked."""

    def __init__(self, source: SequenceSource, seed: int, num_workers: int, length: int) -> None:
        """Start the workers.

        Args:
            source: where sequences come from.
            seed: of the run; a sequence's index is counted over all workers.
            num_workers: processes; 0 makes batches in this process.
            length: tokens of a sequence at first.
        """
        self._source, self._seed, self._length = source, seed, length
        self._next_index = 0
        self.waited_s = 0.0
        context = multiprocessing.get_context("fork")
        self._length_now: Synchronized[int] = context.Value("i", length)
        self._stopped: Synchronized[int] = context.Value("i", 0)
        self._chunks: Queue[tuple[int, Batch]] = context.Queue(maxsize=max(8, 4 * num_workers))
        self._rest: Batch | None = None
        shared = (self._length_now, self._stopped, self._chunks)
        target: Callable[..., None] = _work
        self._workers = [
            context.Process(target=target, args=(source, seed, i, num_workers, shared), daemon=True)
            for i in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def set_length(self, length: int) -> None:
        """Make sequences of `length` tokens from now on."""
        if length != self._length:
            self._length, self._length_now.value, self._rest = length, length, None

    def next(self, count: int) -> Batch:
        """The next `count` sequences.

        Raises:
            RuntimeError: the workers have been silent for a minute.
        """
        started = time.monotonic()
        parts = [] if self._rest is None else [self._rest]
        while sum(map(len, parts)) < count:
            parts.append(self._chunk())
        self.waited_s += time.monotonic() - started
        whole = Batch.join(parts)
        self._rest = whole.part(count, None) if len(whole) > count else None
        return whole.part(0, count)

    def _chunk(self) -> Batch:
        if not self._workers:
            rows = max(1, _CHUNK_TOKENS // self._length)
            first, self._next_index = self._next_index, self._next_index + rows
            return self._source.batch(Split.TRAIN, self._seed, first, rows, self._length)
        while True:
            try:
                length, batch = self._chunks.get(timeout=60.0)
            except queue.Empty:
                alive = sum(worker.is_alive() for worker in self._workers)
                raise RuntimeError(
                    f"no training batch for 60 s; {alive} of {len(self._workers)} workers live"
                ) from None
            if length == self._length:
                return batch

    def close(self) -> None:
        """End the workers."""
        self._stopped.value = 1
        for worker in self._workers:
            worker.terminate()
