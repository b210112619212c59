"""State between device and host memory: blocks, and the windows of a request, beside the steps.

    save a block    after the step that filled it was collected; on the copy stream, while its
                    memory is held by whoever asked
    save windows    gathered into one buffer on the compute stream, within the step after which
                    they are wanted; then copied on the copy stream
    load            on the copy stream, into memory that nobody else holds; the compute stream
                    waits before the first step that reads it

Saves and loads of one state are in the order of the copy stream, so a state may be loaded while
its save is still on the way.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepinfer.cache.host_tier import HostState
from deepinfer.device.errors import ContractError
from deepinfer.device.runtime import Event, Runtime
from deepinfer.engine.step_state import SchedulerOutputs, SequenceMetadata
from deepinfer.model.caches import ModelCaches


class SavedWindow(NamedTuple):
    """Windows of all layers before position `stop`, for the ring of `slot`."""

    state: HostState
    slot: int
    stop: int


class SavedBlocks(NamedTuple):
    """States of blocks, valid once `done` has happened; until then the blocks must stay."""

    states: tuple[HostState, ...]
    done: Event


class StateCopies(Protocol):
    """Copies of one rank; calls return before anything is copied."""

    @property
    def block_bytes(self) -> int:
        """Bytes of the state of a block."""
        ...

    @property
    def window_bytes(self) -> int:
        """Bytes of the windows of a request."""
        ...

    @property
    def block_record(self) -> str:
        """Layout of the state of a block; one of another layout cannot be loaded."""
        ...

    def save_blocks(self, blocks: Sequence[int]) -> SavedBlocks:
        """Copy blocks whose rows are computed and collected."""
        ...

    def save_window(self, slot: int, stop: int) -> HostState:
        """Copy the windows before `stop` as the work enqueued so far leaves them."""
        ...

    def load(self, blocks: Sequence[tuple[HostState, int]], window: SavedWindow | None) -> Event:
        """Copy states into blocks and a window ring that nobody else holds; the event of the end.

        Raises:
            ContractError: a state has another layout.
        """
        ...

    def wait_before_next_step(self, done: Event) -> None:
        """Let what the compute stream does next see what a load has brought."""
        ...


def save_windows(
    scheduled: SchedulerOutputs, copies: StateCopies
) -> tuple[tuple[SequenceMetadata, HostState], ...]:
    """Save the windows that a step is to save; call it when all its work has been enqueued."""
    return tuple(
        (metadata, copies.save_window(metadata.slot, metadata.stop))
        for metadata in scheduled.sequences
        if metadata.saves_window
    )


@dataclass(frozen=True, slots=True)
class HostBytes:
    """A saved state: bytes in pinned memory, and what their order means.

    Attributes:
        record: layout, for example for the header of a stored state.
        data: [num_bytes] uint8, valid once the copy stream has got there.
    """

    record: str
    data: Tensor

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    def checksum(self) -> str:
        """Digest of layout and bytes, for whoever stores or sends them; the copy has ended."""
        digest = hashlib.blake2b(self.record.encode(), digest_size=16)
        digest.update(self.data.numpy().tobytes())
        return digest.hexdigest()


class DeviceStateCopies:
    """Copies between the caches of a device and pinned memory, by the caches' byte views."""

    def __init__(self, caches: ModelCaches, runtime: Runtime) -> None:
        """Nothing on the way.

        Args:
            caches: of the model.
            runtime: its compute stream writes them.
        """
        self._caches, self._runtime = caches, runtime
        self._block_bytes = _num_bytes(caches.block_views(0))
        self._window_bytes = _num_bytes(caches.window_views(0, caches.window))
        # Device buffers that a copy still reads.
        self._gathered: deque[tuple[Event, list[Tensor]]] = deque()

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def window_bytes(self) -> int:
        return self._window_bytes

    @property
    def block_record(self) -> str:
        return self._caches.block_record

    def save_blocks(self, blocks: Sequence[int]) -> SavedBlocks:
        stream = self._runtime.copy_stream
        record = self.block_record
        states = tuple(self._new_state(record, self._block_bytes) for _ in blocks)
        for block, state in zip(blocks, states, strict=True):
            stream.enqueue(partial(_gather, self._caches.block_views(block), state.data))
        return SavedBlocks(states, stream.record_event())

    def save_window(self, slot: int, stop: int) -> HostBytes:
        compute, copies = self._runtime.compute_stream, self._runtime.copy_stream
        while self._gathered and self._gathered[0][0].query():
            self._gathered.popleft()
        state = self._new_state(self._caches.window_record, self._window_bytes)
        views = self._caches.window_views(slot, stop)
        gathered: list[Tensor] = []
        compute.enqueue(lambda: gathered.append(torch.cat(views)))
        copies.wait_event(compute.record_event())
        copies.enqueue(lambda: _gather(gathered, state.data))
        self._gathered.append((copies.record_event(), gathered))
        return state

    def load(self, blocks: Sequence[tuple[HostState, int]], window: SavedWindow | None) -> Event:
        stream = self._runtime.copy_stream
        for state, block in blocks:
            data = _data(state, self.block_record)
            stream.enqueue(partial(_scatter, data, self._caches.block_views(block)))
        if window is not None:
            data = _data(window.state, self._caches.window_record)
            views = self._caches.window_views(window.slot, window.stop)
            stream.enqueue(partial(_scatter, data, views))
        return stream.record_event()

    def wait_before_next_step(self, done: Event) -> None:
        self._runtime.compute_stream.wait_event(done)

    def _new_state(self, record: str, num_bytes: int) -> HostBytes:
        return HostBytes(record, self._runtime.pinned((num_bytes,), torch.uint8))


def _data(state: HostState, record: str) -> Tensor:
    if not isinstance(state, HostBytes) or state.record != record:
        raise ContractError(
            f"a saved state of record {getattr(state, 'record', type(state).__name__)!r} cannot "
            f"be loaded into caches of record {record!r}; look it up under a name whose seed "
            "holds the record"
        )
    return state.data


def _num_bytes(views: Sequence[Tensor]) -> int:
    return sum(view.numel() for view in views)


def _gather(views: Sequence[Tensor], data: Tensor) -> None:
    parts = data.split([view.numel() for view in views])
    for view, part in zip(views, parts, strict=True):
        part.copy_(view, non_blocking=True)


def _scatter(data: Tensor, views: Sequence[Tensor]) -> None:
    parts = data.split([view.numel() for view in views])
    for view, part in zip(views, parts, strict=True):
        view.copy_(part, non_blocking=True)
