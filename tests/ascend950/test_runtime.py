"""The runtime over the emulated device: order, closing, foreign events, graphs, memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from deepinfer.device.errors import ContractError
from deepinfer_ascend950.emulation.device import EmulatedDevice
from deepinfer_ascend950.runtime import NpuRuntime


@pytest.fixture
def runtime() -> Iterator[NpuRuntime]:
    made = NpuRuntime(EmulatedDevice())
    yield made
    made.close()


class ForeignEvent:
    time_us = 0.0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def test_work_runs_in_order_and_without_gradients(runtime: NpuRuntime) -> None:
    seen: list[object] = []
    stream = runtime.compute_stream
    stream.enqueue(lambda: seen.append(torch.is_grad_enabled()))
    event = stream.record_event()
    runtime.copy_stream.wait_event(event)
    stream.enqueue(lambda: seen.append("second"))
    stream.synchronize()
    assert seen == [False, "second"]
    assert event.query()


def test_a_timed_event_stands_between_the_times_around_it(runtime: NpuRuntime) -> None:
    before = runtime.now_us()
    event = runtime.compute_stream.record_event(timed=True)
    event.synchronize()
    slack_us = 2e5  # the host may be held up before it reads the start of the clock
    assert before - slack_us <= event.time_us <= runtime.now_us() + slack_us
    time.sleep(0.02)
    later = runtime.compute_stream.record_event(timed=True)
    assert later.time_us - event.time_us >= 1.9e4


def test_an_event_without_timing_has_no_time(runtime: NpuRuntime) -> None:
    with pytest.raises(ContractError, match="record it with timed=True"):
        _ = runtime.compute_stream.record_event().time_us


def test_an_event_of_another_backend_is_refused(runtime: NpuRuntime) -> None:
    with pytest.raises(ContractError, match="event of type ForeignEvent"):
        runtime.compute_stream.wait_event(ForeignEvent())


def test_captured_work_runs_at_capture_and_at_every_replay(runtime: NpuRuntime) -> None:
    count = torch.zeros(())

    def work() -> None:
        count.add_(1)

    graph = runtime.capture(work)
    at_capture = float(count)
    runtime.compute_stream.enqueue(graph.replay)
    assert at_capture >= 1.0
    assert float(count) == at_capture + 1.0


def test_closed_runtime_refuses_further_calls() -> None:
    runtime = NpuRuntime(EmulatedDevice())
    stream = runtime.new_stream("extra")
    runtime.close()
    runtime.close()
    with pytest.raises(ContractError, match="stream 'extra' is closed"):
        stream.enqueue(lambda: None)
    with pytest.raises(ContractError, match="pinned: the ascend950 runtime is closed"):
        runtime.pinned((1,), torch.int64)


def test_generator_is_seeded(runtime: NpuRuntime) -> None:
    first = torch.rand(3, generator=runtime.generator(7))
    assert torch.equal(first, torch.rand(3, generator=runtime.generator(7)))


def test_memory_is_what_the_device_says(runtime: NpuRuntime) -> None:
    facts = runtime.memory()
    assert 0 < facts.free_bytes <= facts.total_bytes


def test_pinned_memory_has_the_asked_form(runtime: NpuRuntime) -> None:
    pinned = runtime.pinned((2, 3), torch.int64)
    assert (pinned.shape, pinned.dtype) == ((2, 3), torch.int64)


def test_group_of_one_moves_nothing_and_refuses_other_sizes(runtime: NpuRuntime) -> None:
    group, values = runtime.device_group, torch.arange(3)
    assert (group.rank, group.size) == (0, 1)
    assert torch.equal(group.all_reduce_sum(values), values)
    assert group.all_gather(values).shape == (1, 3)
    with pytest.raises(ContractError, match=r"shape \[3\], expected \[1, ...\]"):
        group.all_to_all(values)
