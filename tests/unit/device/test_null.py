"""The null device: virtual time, accounting, failures, scripts."""

from __future__ import annotations

import pytest
import torch

from deepinfer.device.errors import ContractError
from deepinfer.device.null import (
    MAX_ACCEPTED,
    CounterScript,
    ListScript,
    NullRuntime,
    RandomScript,
    RepeatScript,
    StepCosts,
    TokenScript,
)
from deepinfer.device.runtime import MemoryFacts, Runtime, StepKind


class Boom(Exception):
    """Raised by work on purpose."""


def boom() -> None:
    raise Boom("on purpose")


def nothing() -> None:
    """Work without effect."""


def enqueue(runtime: NullRuntime, cost_us: float) -> None:
    """Enqueue work without effect on the compute stream."""
    with runtime.step_cost(cost_us):
        runtime.compute_stream.enqueue(nothing)


def test_runtime_satisfies_the_protocol() -> None:
    runtime: Runtime = NullRuntime(memory=MemoryFacts(9, 7), poisons_released=True)
    assert runtime.memory() == MemoryFacts(9, 7)
    assert runtime.poisons_released


def test_time_stands_still_until_it_is_moved() -> None:
    runtime = NullRuntime()
    enqueue(runtime, 10)
    assert runtime.clock.now_us == 0
    runtime.clock.advance(4)
    assert runtime.clock.now_us == 4


def test_event_happens_when_the_clock_reaches_the_end_of_the_work() -> None:
    runtime = NullRuntime()
    enqueue(runtime, 10)
    event = runtime.compute_stream.record_event()
    runtime.clock.advance(9)
    assert not event.query()
    runtime.clock.advance(1)
    assert event.query()


def test_work_runs_only_when_the_clock_passes_its_end() -> None:
    runtime = NullRuntime()
    seen_us: list[float] = []
    with runtime.step_cost(10):
        runtime.compute_stream.enqueue(lambda: seen_us.append(runtime.clock.now_us))
    runtime.clock.advance(9)
    assert seen_us == []
    runtime.clock.advance(100)
    assert seen_us == [10]


def test_work_starts_when_the_stream_is_free() -> None:
    runtime = NullRuntime()
    enqueue(runtime, 10)
    enqueue(runtime, 5)
    assert runtime.compute_stream.record_event().time_us == 15


def test_work_on_a_free_stream_starts_now() -> None:
    runtime = NullRuntime()
    runtime.clock.advance(7)
    enqueue(runtime, 5)
    assert runtime.compute_stream.record_event().time_us == 12


def test_work_without_cost_on_a_free_stream_is_done_at_once() -> None:
    runtime = NullRuntime()
    ran: list[int] = []
    runtime.compute_stream.enqueue(lambda: ran.append(1))
    assert ran == [1]
    assert runtime.compute_stream.record_event().query()


def test_work_without_cost_waits_for_the_work_before_it() -> None:
    runtime = NullRuntime()
    order: list[int] = []
    with runtime.step_cost(3):
        runtime.compute_stream.enqueue(lambda: order.append(1))
    runtime.compute_stream.enqueue(lambda: order.append(2))
    assert order == []
    runtime.clock.advance(3)
    assert order == [1, 2]


def test_completions_of_several_streams_run_in_the_order_of_time() -> None:
    runtime = NullRuntime()
    order: list[str] = []
    with runtime.step_cost(10):
        runtime.compute_stream.enqueue(lambda: order.append("compute"))
    with runtime.step_cost(4):
        runtime.copy_stream.enqueue(lambda: order.append("copy"))
    runtime.clock.advance(20)
    assert order == ["copy", "compute"]


def test_wait_event_delays_later_work_of_the_other_stream() -> None:
    runtime = NullRuntime()
    order: list[str] = []
    with runtime.step_cost(10):
        runtime.compute_stream.enqueue(lambda: order.append("compute"))
    runtime.copy_stream.wait_event(runtime.compute_stream.record_event())
    with runtime.step_cost(2):
        runtime.copy_stream.enqueue(lambda: order.append("copy"))
    assert runtime.copy_stream.record_event().time_us == 12
    runtime.copy_stream.synchronize()
    assert order == ["compute", "copy"]


def test_work_enqueued_by_work_starts_at_its_end() -> None:
    runtime = NullRuntime()
    seen_us: list[float] = []

    def follow() -> None:
        with runtime.step_cost(5):
            runtime.copy_stream.enqueue(lambda: seen_us.append(runtime.clock.now_us))

    with runtime.step_cost(10):
        runtime.compute_stream.enqueue(follow)
    runtime.clock.advance(20)
    assert seen_us == [15]


def test_synchronize_moves_the_clock_and_counts_the_wait() -> None:
    runtime = NullRuntime()
    enqueue(runtime, 10)
    runtime.clock.advance(4)
    runtime.compute_stream.record_event().synchronize()
    assert runtime.clock.now_us == 10
    assert runtime.accounting().host_wait_us == 6


def test_synchronizing_with_the_past_neither_waits_nor_turns_time_back() -> None:
    runtime = NullRuntime()
    enqueue(runtime, 10)
    event = runtime.compute_stream.record_event()
    runtime.clock.advance(25)
    event.synchronize()
    assert runtime.clock.now_us == 25
    assert runtime.accounting().host_wait_us == 0


def test_idle_share_is_the_gaps_over_gaps_and_work() -> None:
    runtime = NullRuntime()
    runtime.clock.advance(100)  # before the first work: not counted
    enqueue(runtime, 30)
    runtime.clock.advance(40)  # 10 longer than the device needed
    enqueue(runtime, 60)
    runtime.clock.advance(500)  # after the last work: not counted
    accounting = runtime.accounting()
    assert (accounting.device_busy_us, accounting.device_idle_us) == (90, 10)
    assert accounting.idle_share == 0.1


def test_work_without_cost_neither_fills_nor_ends_a_gap() -> None:
    runtime = NullRuntime()
    enqueue(runtime, 30)
    runtime.clock.advance(35)
    runtime.compute_stream.enqueue(nothing)
    runtime.clock.advance(5)
    enqueue(runtime, 30)
    runtime.clock.advance(100)
    runtime.compute_stream.enqueue(nothing)
    assert runtime.accounting().device_idle_us == 10


def test_idle_share_of_nothing_is_zero() -> None:
    assert NullRuntime().accounting().idle_share == 0.0


def test_a_pipeline_one_step_deep_leaves_no_gap() -> None:
    runtime = NullRuntime()
    previous = None
    for _ in range(20):
        runtime.clock.advance(80)  # the host's part is 80 % of the step
        enqueue(runtime, 100)
        event = runtime.compute_stream.record_event()
        if previous is not None:
            previous.synchronize()
        previous = event
    assert runtime.accounting().idle_share == 0.0
    assert runtime.accounting().host_wait_us == 19 * 20


def test_a_loop_that_waits_for_each_step_shows_the_hosts_part_as_idle() -> None:
    runtime = NullRuntime()
    for _ in range(20):
        runtime.clock.advance(25)
        enqueue(runtime, 75)
        runtime.compute_stream.synchronize()
    accounting = runtime.accounting()
    assert accounting.device_idle_us == 19 * 25
    assert accounting.host_wait_us == 20 * 75


def test_reset_accounting_forgets_the_warm_up() -> None:
    runtime = NullRuntime()
    enqueue(runtime, 10)
    runtime.compute_stream.synchronize()
    runtime.clock.advance(50)
    runtime.reset_accounting()
    enqueue(runtime, 10)
    accounting = runtime.accounting()
    assert (accounting.device_busy_us, accounting.device_idle_us) == (10, 0)
    assert accounting.host_wait_us == 0


def test_step_costs_depend_on_kind_and_rows() -> None:
    costs = StepCosts(fixed_us={StepKind.DECODE: 100, StepKind.EMPTY: 5}, row_us=2)
    runtime = NullRuntime(costs)
    with runtime.step(StepKind.DECODE, 8):
        runtime.compute_stream.enqueue(nothing)
    with runtime.step(StepKind.EMPTY, 0):
        runtime.compute_stream.enqueue(nothing)
    assert runtime.accounting().device_busy_us == 116 + 5


def test_cost_ends_with_its_block() -> None:
    runtime = NullRuntime()
    with runtime.step_cost(5):
        with runtime.step_cost(7):
            assert runtime.current_cost_us == 7
        assert runtime.current_cost_us == 5
    assert runtime.current_cost_us == 0


def test_negative_times_are_refused() -> None:
    runtime = NullRuntime()
    with pytest.raises(ContractError, match=r"-1 us is negative"):
        runtime.clock.advance(-1)
    with pytest.raises(ContractError, match=r"-2 us is negative"), runtime.step_cost(-2):
        pass


def test_failure_comes_out_at_events_after_it_only() -> None:
    runtime = NullRuntime()
    enqueue(runtime, 5)
    good = runtime.compute_stream.record_event()
    with runtime.step_cost(5):
        runtime.compute_stream.enqueue(boom)
    failed = runtime.compute_stream.record_event()
    runtime.clock.advance(20)
    assert good.query()
    with pytest.raises(Boom):
        failed.query()
    with pytest.raises(Boom):
        failed.synchronize()


def test_work_after_a_failure_is_skipped() -> None:
    runtime = NullRuntime()
    ran: list[int] = []
    with runtime.step_cost(5):
        runtime.compute_stream.enqueue(boom)
    runtime.compute_stream.enqueue(lambda: ran.append(1))
    with pytest.raises(Boom):
        runtime.compute_stream.synchronize()
    with pytest.raises(Boom):
        runtime.compute_stream.enqueue(nothing)
    assert ran == []


def test_a_stream_that_waits_for_a_failure_fails_too() -> None:
    runtime = NullRuntime()
    ran: list[int] = []
    with runtime.step_cost(5):
        runtime.compute_stream.enqueue(boom)
    runtime.copy_stream.wait_event(runtime.compute_stream.record_event())
    runtime.copy_stream.enqueue(lambda: ran.append(1))
    with pytest.raises(Boom):
        runtime.copy_stream.synchronize()
    assert ran == []


def test_work_that_waits_is_refused() -> None:
    runtime = NullRuntime()
    runtime.compute_stream.enqueue(runtime.compute_stream.synchronize)
    with pytest.raises(ContractError, match="only the host may"):
        runtime.compute_stream.synchronize()


def test_close_runs_what_is_queued_and_refuses_further_calls() -> None:
    runtime = NullRuntime()
    ran: list[int] = []
    with runtime.step_cost(5):
        runtime.compute_stream.enqueue(lambda: ran.append(1))
    runtime.close()
    assert ran == [1]
    assert runtime.accounting().host_wait_us == 0
    runtime.close()
    with pytest.raises(ContractError, match="stream 'compute': enqueue: the null runtime"):
        runtime.compute_stream.enqueue(nothing)


def test_close_raises_a_failure_that_nobody_saw() -> None:
    runtime = NullRuntime()
    runtime.compute_stream.enqueue(boom)
    with pytest.raises(Boom):
        runtime.close()


def test_a_replayed_graph_costs_what_its_enqueueing_says() -> None:
    runtime = NullRuntime()
    ran: list[int] = []
    graph = runtime.capture(lambda: ran.append(1))
    with runtime.step_cost(5):
        runtime.compute_stream.enqueue(graph.replay)
    runtime.compute_stream.synchronize()
    assert ran == [1, 1]
    assert runtime.accounting().device_busy_us == 5


def test_the_group_of_one_moves_nothing() -> None:
    group = NullRuntime().device_group
    values = torch.arange(2)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce_sum(values) is values
    assert group.all_gather(values).shape == (1, 2)
    with pytest.raises(ContractError, match="expected"):
        group.all_to_all(values)


def test_repeat_script_repeats() -> None:
    script: TokenScript = RepeatScript(7, num_accepted=2)
    assert [script.token("a", index) for index in range(3)] == [7, 7, 7]
    assert script.accepted("a", 4) == 2


def test_counter_script_counts_and_wraps_to_its_first_token() -> None:
    script: TokenScript = CounterScript(first=3, vocab_size=6)
    assert [script.token("a", index) for index in range(5)] == [3, 4, 5, 3, 4]


def test_list_script_gives_each_request_its_own_lists() -> None:
    script: TokenScript = ListScript({"a": [5, 6], "b": [9]}, {"a": [0, 5]})
    assert [script.token("a", 1), script.token("b", 0)] == [6, 9]
    assert [script.accepted("a", 1), script.accepted("b", 3)] == [5, 0]


@pytest.mark.parametrize(("request_id", "index"), [("a", 2), ("a", -1), ("x", 0)])
def test_list_script_refuses_what_is_not_written(request_id: str, index: int) -> None:
    with pytest.raises(ContractError, match=f"tokens of request '{request_id}' has"):
        ListScript({"a": [5, 6]}, {}).token(request_id, index)


def test_random_script_depends_on_seed_request_and_index_only() -> None:
    script: TokenScript = RandomScript(seed=1, vocab_size=1000)
    tokens = [script.token("a", index) for index in range(50)]
    again = RandomScript(seed=1, vocab_size=1000)
    assert [again.token("a", index) for index in reversed(range(50))] == tokens[::-1]
    assert [script.token("b", index) for index in range(50)] != tokens
    other = RandomScript(seed=2, vocab_size=1000)
    assert [other.token("a", index) for index in range(50)] != tokens


def test_random_script_draws_every_accepted_count() -> None:
    script = RandomScript(seed=1, vocab_size=10)
    assert {script.accepted("a", step) for step in range(100)} == set(range(MAX_ACCEPTED + 1))


@pytest.mark.parametrize("count", [-1, MAX_ACCEPTED + 1])
def test_accepted_counts_out_of_range_are_refused(count: int) -> None:
    with pytest.raises(ContractError, match="expected 0 to 5"):
        RepeatScript(1, num_accepted=count)
    with pytest.raises(ContractError, match="request 'a': "):
        ListScript({}, {"a": [count]})
