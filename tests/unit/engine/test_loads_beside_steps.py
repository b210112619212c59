"""Loads from the host tier run beside the steps of others, and never into memory of others."""

from __future__ import annotations

import pytest

from tests.unit.engine.host_loads import (
    KNOWN,
    NUM_COPIES,
    disturb_a_load,
    params,
    start_load,
    with_a_prompt_in_host_memory,
)

DEPTHS = [0, 1, 2]


@pytest.mark.parametrize("depth", DEPTHS)
def test_others_go_on_during_a_load(depth: int) -> None:
    null = with_a_prompt_in_host_memory(depth, copy_us=1000.0)
    start_load(null)
    null.runtime.reset_accounting()
    outputs = [output for _ in range(4) for output in null.engine.step()]
    assert [output.request_id for output in outputs] == ["other"] * len(outputs)
    assert len(outputs) == 4
    (known,) = (s for s in null.engine._scheduler.running if s.loads)
    assert known.is_loading
    results = null.run()
    assert results["known"].num_cached_tokens == 28
    if depth:
        assert null.runtime.accounting().device_idle_us == 0
    null.engine.close()


def test_alone_the_device_waits_and_not_the_host() -> None:
    null = with_a_prompt_in_host_memory(1, copy_us=1000.0)
    begin = null.runtime.clock.now_us
    null.engine.add_request("known", [*KNOWN, 9], params(4))
    null.engine.step()
    assert null.engine._pipeline.num_inflight == 1
    assert null.runtime.clock.now_us == begin
    null.engine.flush()
    # One copy after another, then a prefill step of three rows.
    assert null.runtime.clock.now_us - begin == NUM_COPIES * 1000 + 2003
    null.run()
    null.engine.close()


@pytest.mark.parametrize("end", ["abort", "preemption"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_memory_goes_to_nobody_while_a_load_writes_it(depth: int, end: str) -> None:
    disturb_a_load(depth, end)
