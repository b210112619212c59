"""Copies of the null device: rows move when virtual time says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from deepinfer.cache.host_tier import HostState
from deepinfer.device.null import NullRuntime
from deepinfer.device.runtime import Event
from deepinfer.engine.null_memory import NullMemory, SavedRing, SavedRows
from deepinfer.engine.state_copies import SavedBlocks, SavedWindow

BLOCK_BYTES, WINDOW_BYTES = 1000, 3000
"""Made-up sizes of a block's state and of the windows of a request."""


@dataclass(slots=True)
class _SavedBlock:
    num_bytes: int = BLOCK_BYTES
    rows: SavedRows = ()


@dataclass(slots=True)
class _SavedWindow:
    num_bytes: int = WINDOW_BYTES
    ring: SavedRing | None = None


class NullStateCopies:
    """Copies that take `copy_us` each on the copy stream."""

    copy_us = 300.0
    block_bytes, window_bytes = BLOCK_BYTES, WINDOW_BYTES
    block_record = "null"

    def __init__(self, memory: NullMemory | None, runtime: NullRuntime) -> None:
        """Nothing on the way.

        Args:
            memory: what is copied; None when rows are not simulated.
            runtime: time.
        """
        self._memory, self._runtime = memory, runtime

    def save_blocks(self, blocks: Sequence[int]) -> SavedBlocks:
        stream, states = self._runtime.copy_stream, tuple(_SavedBlock() for _ in blocks)

        def save(state: _SavedBlock, block: int) -> None:
            if self._memory is not None:
                state.rows = self._memory.save_block(block)

        for state, block in zip(states, blocks, strict=True):
            with self._runtime.step_cost(self.copy_us):
                stream.enqueue(partial(save, state, block))
        return SavedBlocks(states, stream.record_event())

    def save_window(self, slot: int, stop: int) -> HostState:
        compute, copies, state = (
            self._runtime.compute_stream,
            self._runtime.copy_stream,
            _SavedWindow(),
        )

        def gather() -> None:
            if self._memory is not None:
                state.ring = self._memory.save_window(slot)

        compute.enqueue(gather)
        copies.wait_event(compute.record_event())
        return state

    def load(self, blocks: Sequence[tuple[HostState, int]], window: SavedWindow | None) -> Event:
        stream = self._runtime.copy_stream

        def load_block(state: HostState, block: int) -> None:
            assert isinstance(state, _SavedBlock)  # this device's own
            if self._memory is not None:
                self._memory.load_block(block, state.rows)

        def load_window(loaded: SavedWindow) -> None:
            assert isinstance(loaded.state, _SavedWindow)  # this device's own
            if self._memory is not None:
                self._memory.load_window(loaded.slot, loaded.stop, loaded.state.ring)

        with self._runtime.step_cost(self.copy_us):
            for state, block in blocks:
                stream.enqueue(partial(load_block, state, block))
            if window is not None:
                stream.enqueue(partial(load_window, window))
        return stream.record_event()

    def wait_before_next_step(self, done: Event) -> None:
        self._runtime.compute_stream.wait_event(done)
