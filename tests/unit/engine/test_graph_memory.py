"""What graphs take is measured, and they get no more than is reserved for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from deepinfer.device.runtime import MemoryFacts, Runtime
from deepinfer.engine.graph_memory import GraphMemory

MIB = 2**20


class Device:
    """A runtime whose captures run the work, which says what the device then has free."""

    def __init__(self) -> None:
        self.free_bytes = 1000 * MIB

    def memory(self) -> MemoryFacts:
        return MemoryFacts(4000 * MIB, self.free_bytes)

    def capture(self, work: Callable[[], None]) -> object:
        work()
        return SimpleNamespace(replay=work)

    def takes(self, mib: int) -> Callable[[], None]:
        def work() -> None:
            self.free_bytes -= mib * MIB

        return work


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def memory(device: Device) -> GraphMemory:
    return GraphMemory(cast("Runtime", device), 100 * MIB)


def test_what_captures_took_is_added_up_and_said(
    device: Device, memory: GraphMemory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    memory.capture("four requests", device.takes(30))
    memory.capture("two requests", device.takes(12))
    assert memory.taken_bytes == 42 * MIB
    assert "graph of two requests: 12.0 MiB; graphs have taken 42.0 of 100.0 MiB" in caplog.text


def test_memory_that_others_gave_back_meanwhile_is_no_gain(
    device: Device, memory: GraphMemory
) -> None:
    memory.capture("four requests", device.takes(30))
    memory.capture("two requests", device.takes(-20))
    assert memory.taken_bytes == 30 * MIB


def test_a_graph_that_exceeds_the_reserve_is_refused_and_warned_of_once(
    device: Device, memory: GraphMemory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.capture("four requests", device.takes(60))
    assert memory.has_room("two requests", 40 * MIB)
    assert not memory.has_room("eight requests", 40 * MIB + 1)
    assert not memory.has_room("16 requests", 80 * MIB)
    assert memory.has_room("two requests", 40 * MIB)
    # Other tests may have let notes of captures through.
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "eight requests" in record.message
    assert "60.0 of the 100.0 MiB" in record.message
    assert "lower cache.memory or scheduler.max_num_seqs" in record.message


def test_the_reserve_is_used_up_by_a_graph_that_took_more_than_it_said(
    device: Device, memory: GraphMemory
) -> None:
    assert memory.has_room("four requests", 90 * MIB)
    memory.capture("four requests", device.takes(130))
    assert not memory.has_room("two requests", 0)
