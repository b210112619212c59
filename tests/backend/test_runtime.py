"""The reference runtime: order, events, failures, delays, memory."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from deepinfer.device.errors import CapabilityError, ContractError
from deepinfer.device.runtime import MemoryFacts, Runtime
from deepinfer_reference.runtime import (
    ReferenceRuntime,
    RuntimeMode,
    limit_to_cgroup,
    parse_meminfo,
    parse_vm_stat,
)
from deepinfer_reference.streams import ThreadStream, even_threads

pytestmark = pytest.mark.timeout(20)

_GATE_S = 10.0


class Boom(Exception):
    """Raised by work on purpose."""


def boom() -> None:
    raise Boom("on purpose")


def nothing() -> None:
    """Work without effect."""


@pytest.fixture(params=list(RuntimeMode), ids=lambda mode: mode.value)
def runtime(request: pytest.FixtureRequest) -> Iterator[ReferenceRuntime]:
    """A runtime of each mode, closed after the test."""
    runtime = ReferenceRuntime(request.param)
    yield runtime
    runtime.close()


@pytest.fixture
def threaded() -> Iterator[ReferenceRuntime]:
    """A runtime in thread mode, closed after the test."""
    runtime = ReferenceRuntime(RuntimeMode.THREAD)
    yield runtime
    runtime.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds work back until set; set at the end so that a failed test does not hang."""
    gate = threading.Event()
    yield gate
    gate.set()


def wait_for(gate: threading.Event) -> Callable[[], None]:
    """Work that waits for `gate`."""

    def work() -> None:
        assert gate.wait(_GATE_S)

    return work


def poll(query: Callable[[], bool]) -> int:
    """Number of queries until True; fails after ten seconds."""
    end = time.monotonic() + _GATE_S
    count = 1
    while not query():
        assert time.monotonic() < end
        time.sleep(0.001)
        count += 1
    return count


def test_runtime_satisfies_the_protocol(runtime: ReferenceRuntime) -> None:
    seen: Runtime = runtime
    assert seen.device == torch.device("cpu")


def test_work_runs_in_the_order_of_its_enqueueing(runtime: ReferenceRuntime) -> None:
    order: list[int] = []
    for index in range(200):
        runtime.compute_stream.enqueue(lambda index=index: order.append(index))  # type: ignore[misc]
    runtime.compute_stream.synchronize()
    assert order == list(range(200))


def test_work_runs_without_gradients(runtime: ReferenceRuntime) -> None:
    seen: list[bool] = []
    runtime.compute_stream.enqueue(lambda: seen.append(torch.is_grad_enabled()))
    runtime.compute_stream.synchronize()
    assert seen == [False]
    assert torch.is_grad_enabled()


def test_polling_an_event_ends(runtime: ReferenceRuntime) -> None:
    done: list[int] = []
    runtime.compute_stream.enqueue(lambda: done.append(1))
    poll(runtime.compute_stream.record_event().query)
    assert done == [1]


def test_streams_that_wait_for_each_other_in_turn_finish(runtime: ReferenceRuntime) -> None:
    first, second = runtime.compute_stream, runtime.copy_stream
    order: list[int] = []
    for index in range(0, 100, 2):
        first.enqueue(lambda index=index: order.append(index))  # type: ignore[misc]
        second.wait_event(first.record_event())
        second.enqueue(lambda index=index: order.append(index + 1))  # type: ignore[misc]
        first.wait_event(second.record_event())
    second.synchronize()
    assert order == list(range(100))


def test_waiting_for_an_event_of_the_same_stream_does_not_hang(runtime: ReferenceRuntime) -> None:
    stream = runtime.compute_stream
    stream.enqueue(nothing)
    stream.wait_event(stream.record_event())
    stream.synchronize()


def test_thread_enqueue_returns_before_the_work_is_done(
    threaded: ReferenceRuntime, gate: threading.Event
) -> None:
    stream = threaded.compute_stream
    stream.enqueue(wait_for(gate))
    event = stream.record_event()
    assert not event.query()
    gate.set()
    event.synchronize()
    assert event.query()


def test_event_happens_before_later_work_is_done(
    threaded: ReferenceRuntime, gate: threading.Event
) -> None:
    stream = threaded.compute_stream
    stream.enqueue(nothing)
    early = stream.record_event()
    stream.enqueue(wait_for(gate))
    late = stream.record_event()
    early.synchronize()
    assert early.query()
    assert not late.query()


def test_wait_event_does_not_block_the_caller_nor_let_work_pass(
    threaded: ReferenceRuntime, gate: threading.Event
) -> None:
    order: list[str] = []
    threaded.compute_stream.enqueue(wait_for(gate))
    threaded.compute_stream.enqueue(lambda: order.append("compute"))
    threaded.copy_stream.wait_event(threaded.compute_stream.record_event())
    threaded.copy_stream.enqueue(lambda: order.append("copy"))
    copied = threaded.copy_stream.record_event()
    time.sleep(0.02)
    assert not copied.query()
    gate.set()
    copied.synchronize()
    assert order == ["compute", "copy"]


def test_streams_run_side_by_side(threaded: ReferenceRuntime, gate: threading.Event) -> None:
    threaded.compute_stream.enqueue(wait_for(gate))
    threaded.copy_stream.enqueue(gate.set)
    threaded.compute_stream.synchronize()


def test_many_host_threads_lose_no_wake_up(threaded: ReferenceRuntime) -> None:
    stream = threaded.compute_stream
    num_done = [0]

    def count() -> None:
        num_done[0] += 1

    def host() -> None:
        for _ in range(200):
            stream.enqueue(count)
            stream.record_event().synchronize()

    hosts = [threading.Thread(target=host) for _ in range(4)]
    for thread in hosts:
        thread.start()
    for thread in hosts:
        thread.join(_GATE_S)
    assert num_done == [800]


def test_work_uses_the_thread_count_of_who_enqueued_it(threaded: ReferenceRuntime) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            threaded.compute_stream.enqueue(lambda: seen.append(torch.get_num_threads()))
            threaded.compute_stream.synchronize()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 1]


def test_work_uses_a_power_of_two_of_threads(runtime: ReferenceRuntime) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        torch.set_num_threads(3)
        runtime.compute_stream.enqueue(lambda: seen.append(torch.get_num_threads()))
        runtime.compute_stream.synchronize()
        runtime.capture(lambda: seen.append(torch.get_num_threads()))
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2]
    assert after == 3


@pytest.mark.parametrize(("available", "used"), [(1, 1), (2, 2), (7, 4), (8, 8), (48, 32)])
def test_thread_counts_are_rounded_down(available: int, used: int) -> None:
    assert even_threads(available) == used


def test_work_does_not_outlive_its_execution(threaded: ReferenceRuntime) -> None:
    held = torch.zeros(3)
    alive = weakref.ref(held)
    threaded.compute_stream.enqueue(lambda held=held: held.add_(1))  # type: ignore[misc]
    del held
    threaded.compute_stream.synchronize()
    assert alive() is None


@pytest.mark.parametrize("mode", [RuntimeMode.THREAD, RuntimeMode.ADVERSARIAL])
class TestFailures:
    """What happens after work has raised, in the modes with a thread."""

    def test_synchronize_raises_what_the_work_raised(self, mode: RuntimeMode) -> None:
        runtime = ReferenceRuntime(mode)
        runtime.compute_stream.enqueue(boom)
        with pytest.raises(Boom) as caught:
            runtime.compute_stream.synchronize()
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "boom" in names
        assert "stream 'compute'" in caught.value.__notes__[0]
        runtime.close()

    def test_later_work_is_skipped_and_enqueue_raises(self, mode: RuntimeMode) -> None:
        runtime = ReferenceRuntime(mode)
        ran: list[int] = []
        runtime.compute_stream.enqueue(boom)
        failed = runtime.compute_stream.record_event()
        # The failure may come before or after this call; the work must not run in either case.
        with suppress(Boom):
            for _ in range(1000):
                runtime.compute_stream.enqueue(lambda: ran.append(1))
        with pytest.raises(Boom):
            failed.synchronize()
        with pytest.raises(Boom):
            runtime.compute_stream.enqueue(lambda: ran.append(1))
        runtime.close()
        assert ran == []

    def test_events_before_the_failure_are_good_and_after_it_are_not(
        self, mode: RuntimeMode
    ) -> None:
        runtime = ReferenceRuntime(mode)
        gate = threading.Event()
        stream = runtime.compute_stream
        stream.enqueue(wait_for(gate))
        good = stream.record_event()
        stream.enqueue(boom)
        failed = stream.record_event()
        gate.set()
        with pytest.raises(Boom):
            failed.synchronize()
        with pytest.raises(Boom):
            failed.query()
        good.synchronize()
        assert good.query()
        runtime.close()

    def test_a_stream_that_waits_for_a_failure_fails_too(self, mode: RuntimeMode) -> None:
        runtime = ReferenceRuntime(mode)
        gate = threading.Event()
        ran: list[int] = []
        runtime.compute_stream.enqueue(wait_for(gate))
        runtime.compute_stream.enqueue(boom)
        runtime.copy_stream.wait_event(runtime.compute_stream.record_event())
        runtime.copy_stream.enqueue(lambda: ran.append(1))
        gate.set()
        with pytest.raises(Boom):
            runtime.copy_stream.synchronize()
        runtime.close()
        assert ran == []

    def test_close_raises_a_failure_that_nobody_saw_once(self, mode: RuntimeMode) -> None:
        runtime = ReferenceRuntime(mode)
        runtime.compute_stream.enqueue(boom)
        with pytest.raises(Boom):
            runtime.close()
        runtime.close()

    def test_work_that_ends_the_interpreter_does_not_hang_the_stream(
        self, mode: RuntimeMode
    ) -> None:
        runtime = ReferenceRuntime(mode)
        runtime.compute_stream.enqueue(lambda: sys.exit(3))
        with pytest.raises(SystemExit):
            runtime.compute_stream.synchronize()
        runtime.close()

    def test_the_traceback_does_not_grow(self, mode: RuntimeMode) -> None:
        runtime = ReferenceRuntime(mode)
        runtime.compute_stream.enqueue(boom)
        depths = []
        for _ in range(3):
            with pytest.raises(Boom) as caught:
                runtime.compute_stream.synchronize()
            depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        runtime.close()
        assert len(set(depths)) == 1

    def test_work_that_waits_for_its_own_stream_is_refused(self, mode: RuntimeMode) -> None:
        runtime = ReferenceRuntime(mode)
        runtime.compute_stream.enqueue(runtime.compute_stream.synchronize)
        with pytest.raises(ContractError, match="stream 'compute': its own work waits"):
            runtime.compute_stream.synchronize()
        runtime.close()

    def test_wait_event_refuses_a_foreign_event(self, mode: RuntimeMode) -> None:
        runtime = ReferenceRuntime(mode)
        foreign = ReferenceRuntime(RuntimeMode.INLINE).compute_stream.record_event()
        with pytest.raises(ContractError, match="InlineEvent"):
            runtime.compute_stream.wait_event(foreign)
        runtime.close()

    def test_close_runs_what_is_queued_and_ends_the_threads(self, mode: RuntimeMode) -> None:
        before = set(threading.enumerate())
        runtime = ReferenceRuntime(mode)
        ran: list[int] = []
        started = set(threading.enumerate()) - before
        for index in range(20):
            runtime.compute_stream.enqueue(lambda index=index: ran.append(index))  # type: ignore[misc]
        runtime.close()
        assert ran == list(range(20))
        assert {thread.name for thread in started} == {
            "deepinfer-stream-compute",
            "deepinfer-stream-copy",
        }
        assert not any(thread.is_alive() for thread in started)

    def test_events_stay_usable_after_close(self, mode: RuntimeMode) -> None:
        runtime = ReferenceRuntime(mode)
        runtime.compute_stream.enqueue(nothing)
        event = runtime.compute_stream.record_event()
        runtime.close()
        event.synchronize()
        assert event.query()


def test_calls_after_close_name_the_stream(runtime: ReferenceRuntime) -> None:
    stream = runtime.compute_stream
    event = stream.record_event()
    runtime.close()
    with pytest.raises(ContractError, match="stream 'compute' is closed"):
        stream.enqueue(nothing)
    with pytest.raises(ContractError, match="stream 'compute' is closed"):
        stream.synchronize()
    with pytest.raises(ContractError, match="stream 'compute' is closed"):
        stream.record_event()
    with pytest.raises(ContractError, match="stream 'compute' is closed"):
        stream.wait_event(event)


def test_calls_after_close_of_the_runtime_are_errors(runtime: ReferenceRuntime) -> None:
    runtime.close()
    with pytest.raises(ContractError, match="new_stream: the reference runtime"):
        runtime.new_stream("late")
    with pytest.raises(ContractError, match="memory: the reference runtime"):
        runtime.memory()


def test_inline_work_raises_where_it_is_enqueued() -> None:
    runtime = ReferenceRuntime(RuntimeMode.INLINE)
    with pytest.raises(Boom):
        runtime.compute_stream.enqueue(boom)
    assert runtime.compute_stream.record_event().query()


def test_inline_work_runs_in_the_callers_thread() -> None:
    seen: list[threading.Thread] = []
    stream = ReferenceRuntime(RuntimeMode.INLINE).compute_stream
    stream.enqueue(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()]


def test_a_freed_stream_finishes_its_work_and_logs_its_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = ThreadStream("forgotten")
    [thread] = [each for each in threading.enumerate() if each.name.endswith("forgotten")]
    stream.enqueue(boom)
    with caplog.at_level(logging.ERROR):
        del stream
        gc.collect()
        thread.join(_GATE_S)
    assert not thread.is_alive()
    assert "'forgotten' was freed before anybody saw its failure" in caplog.text


def test_a_program_that_forgets_to_close_ends_well_after_its_work() -> None:
    program = (
        "import torch\n"
        "from deepinfer_reference.runtime import ReferenceRuntime\n"
        "stream = ReferenceRuntime().compute_stream\n"
        "a = torch.ones(400, 400)\n"
        "for _ in range(40): stream.enqueue(lambda: torch.mm(a, a))\n"
        "stream.enqueue(lambda: print('done', flush=True))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


class TestAdversarial:
    """Delays that a seed decides."""

    @pytest.mark.parametrize("seed", range(20))
    def test_an_event_is_late_and_its_work_has_not_run(self, seed: int) -> None:
        runtime = ReferenceRuntime(RuntimeMode.ADVERSARIAL, seed=seed)
        ran: list[int] = []
        runtime.compute_stream.enqueue(lambda: ran.append(1))
        event = runtime.compute_stream.record_event()
        time.sleep(0.002)
        assert not event.query()
        assert ran == []
        event.synchronize()
        assert ran == [1]
        runtime.close()

    def test_waiting_for_an_event_leaves_later_work_held(self) -> None:
        runtime = ReferenceRuntime(RuntimeMode.ADVERSARIAL, seed=3)
        ran: list[str] = []
        runtime.compute_stream.enqueue(lambda: ran.append("early"))
        early = runtime.compute_stream.record_event()
        runtime.compute_stream.enqueue(lambda: ran.append("late"))
        early.synchronize()
        time.sleep(0.002)
        assert ran == ["early"]
        runtime.close()

    def test_no_more_than_max_held_pieces_stay_held(self) -> None:
        runtime = ReferenceRuntime(RuntimeMode.ADVERSARIAL, seed=0, max_held=4)
        ran: list[int] = []
        held = []
        for index in range(200):
            runtime.compute_stream.enqueue(lambda index=index: ran.append(index))  # type: ignore[misc]
            held.append(index + 1 - len(ran))
        assert set(held) == {1, 2, 3, 4}
        runtime.close()

    def test_number_of_false_answers_stays_within_max_queries(self) -> None:
        runtime = ReferenceRuntime(RuntimeMode.ADVERSARIAL, seed=0, max_queries=3)
        counts = set()
        for _ in range(50):
            runtime.compute_stream.enqueue(nothing)
            counts.add(poll(runtime.compute_stream.record_event().query) - 1)
        assert counts == {1, 2, 3}
        runtime.close()

    @staticmethod
    def _history(seed: int) -> list[object]:
        """Everything a host sees of a fixed series of calls."""
        runtime = ReferenceRuntime(RuntimeMode.ADVERSARIAL, seed=seed)
        compute, copy = runtime.compute_stream, runtime.copy_stream
        ran: list[int] = []
        seen: list[object] = []
        for index in range(60):
            compute.enqueue(lambda index=index: ran.append(index))  # type: ignore[misc]
            event = compute.record_event()
            copy.wait_event(event)
            copy.enqueue(lambda index=index: ran.append(1000 + index))  # type: ignore[misc]
            seen.append((event.query(), copy.record_event().query(), tuple(ran)))
        runtime.close()
        return seen

    def test_the_same_seed_gives_the_same_history(self) -> None:
        assert self._history(7) == self._history(7)

    def test_another_seed_gives_another_history(self) -> None:
        assert self._history(7) != self._history(8)

    def test_a_host_buffer_overwritten_too_early_is_noticed(self) -> None:
        runtime = ReferenceRuntime(RuntimeMode.ADVERSARIAL, seed=1)
        buffer = runtime.pinned((1,), torch.int64)
        buffer.fill_(1)
        read: list[int] = []
        runtime.compute_stream.enqueue(lambda: read.append(int(buffer[0])))
        buffer.fill_(2)  # the fault: no event was waited for
        runtime.compute_stream.synchronize()
        assert read == [2]
        runtime.close()

    def test_memory_not_yet_written_is_poisoned(self) -> None:
        runtime = ReferenceRuntime(RuntimeMode.ADVERSARIAL)
        assert runtime.pinned((2,), torch.float32).isnan().all()
        assert (runtime.pinned((2,), torch.int64) == torch.iinfo(torch.int64).min).all()
        assert runtime.pinned((2,), torch.bool).all()
        runtime.close()

    @pytest.mark.parametrize("limits", [{"max_held": 0}, {"max_queries": 0}])
    def test_limits_below_one_are_refused(self, limits: dict[str, int]) -> None:
        with pytest.raises(ContractError, match="must be at least 1"):
            ReferenceRuntime(RuntimeMode.ADVERSARIAL, **limits)


def test_only_the_adversarial_mode_poisons(runtime: ReferenceRuntime) -> None:
    assert runtime.poisons_released == (runtime.mode is RuntimeMode.ADVERSARIAL)


def test_capture_runs_once_after_queued_work_and_replay_runs_again(
    runtime: ReferenceRuntime,
) -> None:
    order: list[str] = []
    runtime.compute_stream.enqueue(lambda: order.append("before"))
    graph = runtime.capture(lambda: order.append("graph"))
    assert order == ["before", "graph"]
    runtime.compute_stream.enqueue(graph.replay)
    runtime.compute_stream.synchronize()
    assert order == ["before", "graph", "graph"]


def test_a_failed_capture_leaves_the_stream_usable(runtime: ReferenceRuntime) -> None:
    with pytest.raises(Boom):
        runtime.capture(boom)
    runtime.compute_stream.enqueue(nothing)
    runtime.compute_stream.synchronize()


def test_pinned_has_the_shape_and_dtype_asked_for(runtime: ReferenceRuntime) -> None:
    values = runtime.pinned((0, 3), torch.bfloat16)
    assert (tuple(values.shape), values.dtype) == ((0, 3), torch.bfloat16)


def test_generators_of_one_seed_agree(runtime: ReferenceRuntime) -> None:
    draws = [torch.rand(4, generator=runtime.generator(seed)) for seed in (5, 5, 6)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_memory_is_positive_and_free_is_at_most_total(runtime: ReferenceRuntime) -> None:
    facts = runtime.memory()
    assert 0 < facts.free_bytes <= facts.total_bytes


def test_meminfo_counts_are_kibibytes() -> None:
    text = "MemTotal:  2000 kB\nMemFree: 10 kB\nMemAvailable:    1000 kB\nHugePages_Total: 0\n"
    assert parse_meminfo(text) == MemoryFacts(2000 * 1024, 1000 * 1024)


def test_meminfo_without_available_memory_is_refused() -> None:
    with pytest.raises(CapabilityError, match="MemAvailable"):
        parse_meminfo("MemTotal:  2000 kB\n")


def test_a_control_group_lowers_the_facts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 200\n")
    assert limit_to_cgroup(MemoryFacts(5000, 4000), tmp_path) == MemoryFacts(1000, 500)


@pytest.mark.parametrize("limit", ["max\n", None])
def test_an_unlimited_control_group_changes_nothing(tmp_path: Path, limit: str | None) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert limit_to_cgroup(MemoryFacts(5000, 4000), tmp_path) == MemoryFacts(5000, 4000)


def test_vm_stat_counts_free_inactive_and_speculative_pages() -> None:
    listing = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               10.\n"
        "Pages active:                            500.\n"
        "Pages inactive:                           20.\n"
        "Pages speculative:                         3.\n"
    )
    assert parse_vm_stat(listing) == 33 * 16384


def test_vm_stat_without_page_size_is_refused() -> None:
    with pytest.raises(CapabilityError, match="vm_stat"):
        parse_vm_stat("Pages free: 10.\n")


def test_the_group_of_one_moves_nothing(runtime: ReferenceRuntime) -> None:
    values = torch.arange(3.0)
    group = runtime.device_group
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce_sum(values) is values
    assert torch.equal(group.all_gather(values), values[None])
    assert torch.equal(group.all_to_all(values[None]), values[None])
    group.barrier()


def test_all_to_all_wants_one_entry_for_each_rank(runtime: ReferenceRuntime) -> None:
    with pytest.raises(ContractError, match=r"shape \[2\], expected \[1, \.\.\.\]"):
        runtime.cpu_group.all_to_all(torch.zeros(2))


def test_timed_events_tell_when_the_work_before_them_ended(runtime: ReferenceRuntime) -> None:
    stream = runtime.compute_stream
    begin = stream.record_event(timed=True)
    stream.enqueue(lambda: time.sleep(0.02))
    end = stream.record_event(timed=True)
    end.synchronize()
    assert end.time_us - begin.time_us >= 20_000
    assert end.time_us <= runtime.now_us()


def test_a_timed_event_of_an_idle_stream_happens_when_recorded(runtime: ReferenceRuntime) -> None:
    runtime.compute_stream.enqueue(nothing)
    runtime.compute_stream.synchronize()
    before_us = runtime.now_us()
    event = runtime.compute_stream.record_event(timed=True)
    event.synchronize()
    assert before_us <= event.time_us <= runtime.now_us()


def test_times_that_are_not_known_are_refused(
    threaded: ReferenceRuntime, gate: threading.Event
) -> None:
    with pytest.raises(ContractError, match="timed=True"):
        _ = threaded.compute_stream.record_event().time_us
    threaded.compute_stream.enqueue(wait_for(gate))
    late = threaded.compute_stream.record_event(timed=True)
    with pytest.raises(ContractError, match="has not happened"):
        _ = late.time_us
    gate.set()
