"""What the zero-overhead scheduler promises, line by line, on the null device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.device.null import CounterScript, ListScript, RandomScript
from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import SequenceStatus
from tests.unit.engine.conftest import NullEngine

MakeNull = Callable[..., NullEngine]
EOS = 1
DEPTHS = [0, 1, 2]
DEPTH = "scheduler.async_depth"


def endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def counted(max_tokens: int) -> list[int]:
    """The counting script's answer."""
    return list(range(20, 20 + max_tokens))


def steps(null: NullEngine, count: int) -> None:
    for _ in range(count):
        null.engine.step()


@pytest.mark.parametrize("depth", DEPTHS)
def test_as_many_steps_stay_in_flight_as_the_depth(depth: int, make_null: MakeNull) -> None:
    null = make_null(**{DEPTH: depth})
    null.engine.add_request("r", [5], endless(20))
    steps(null, 6)
    assert null.engine._pipeline.num_inflight == depth
    assert null.engine.stats().generated_tokens == 6 - depth


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_zo_5_published_example(depth: int, accepted: int, make_null: MakeNull) -> None:
    """1,000 tokens cached, 0 to 3 drafts accepted, the next step launched before it is known.

    The device checks every row that the step reads: range, owner and token.
    """
    script = CounterScript(20, 300, num_accepted=accepted)
    null = make_null(
        script,
        max_drafts=3,
        max_model_len=1024,
        **{DEPTH: depth, "scheduler.max_num_tokens": 1024, "cache.num_blocks": 400},
    )
    null.engine.add_request("r", [5] * 1000, endless(17))
    steps(null, 1 + depth)
    if depth:
        (sequence,) = null.engine._scheduler.running
        # Nothing of the first verification is known, and the next one is on its way.
        assert sequence.num_cached_tokens <= 1000
        assert sequence.total_inflight_tokens >= 4
    (answer,) = null.run()["r"].outputs
    assert answer.token_ids == counted(17)


def test_in_flight_tokens_reserve_their_room(make_null: MakeNull) -> None:
    """ZO-3."""
    null = make_null(max_drafts=5, **{DEPTH: 2, "cache.block_size": 4})
    null.engine.add_request("r", [5, 6, 7], endless(60))
    steps(null, 3)
    (sequence,) = null.engine._scheduler.running
    # Prefill committed: two verifications of six rows each are out.
    assert (sequence.num_cached_tokens, sequence.total_inflight_tokens) == (3, 12)
    assert len(sequence.blocks) * 4 >= 15


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_token_after_the_end_is_shown_or_counted(depth: int, make_null: MakeNull) -> None:
    null = make_null(ListScript({"r": [40, 41, EOS, 43, 44, 45]}, {}), **{DEPTH: depth})
    null.engine.add_request("r", [5], SamplingParams(temperature=0.0, max_tokens=6))
    (answer,) = null.run()["r"].outputs
    assert (answer.token_ids, answer.finish_reason) == ([40, 41, EOS], FinishReason.STOP)
    assert null.engine.stats().generated_tokens == 3


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("end", range(6))
def test_an_end_inside_accepted_drafts_drops_the_rest(
    end: int, depth: int, make_null: MakeNull
) -> None:
    tokens = [40 + index for index in range(20)]
    tokens[end] = EOS
    null = make_null(ListScript({"r": tokens}, {"r": [5] * 20}), max_drafts=5, **{DEPTH: depth})
    null.engine.add_request("r", [5], SamplingParams(temperature=0.0, max_tokens=20))
    (answer,) = null.run()["r"].outputs
    assert answer.token_ids == tokens[: end + 1]
    assert null.engine.stats().generated_tokens == end + 1


def test_memory_of_an_ended_sequence_waits_for_the_step_in_flight(make_null: MakeNull) -> None:
    """ZO-7."""
    null = make_null(ListScript({"a": [40, EOS, 43, 44], "b": [50] * 40}, {}), **{DEPTH: 1})
    null.engine.add_request("a", [5], SamplingParams(temperature=0.0, max_tokens=4))
    null.engine.add_request("b", [5], endless(30))
    scheduler = null.engine._scheduler
    (ended,) = [s for s in scheduler.waiting if s.request.request_id == "a"]
    while ended.status is not SequenceStatus.FINISHED:
        null.engine.step()
    assert scheduler.num_deferred_blocks == 1
    assert scheduler.slots.num_used == 2
    null.engine.step()
    assert scheduler.num_deferred_blocks == 0
    assert scheduler.slots.num_used == 1


def test_a_late_result_changes_nothing_of_a_preempted_sequence(make_null: MakeNull) -> None:
    """ZO-8."""
    null = make_null(**{DEPTH: 1})
    null.engine.add_request("r", [5, 6], endless(9))
    steps(null, 4)
    (sequence,) = null.engine._scheduler.running
    known = list(sequence.token_ids)
    null.engine._scheduler.preempt(sequence)
    null.engine.step()
    assert sequence.token_ids == known
    assert sequence.num_cached_tokens == 0
    (answer,) = null.run()["r"].outputs
    assert answer.token_ids == counted(9)


@pytest.mark.parametrize("depth", [1, 2])
def test_flush_finishes_what_is_in_flight(depth: int, make_null: MakeNull) -> None:
    """ZO-9: the last step of a sequence that ended early still runs when nobody is left."""
    null = make_null(ListScript({"r": [40, EOS] + [44] * 9}, {}), **{DEPTH: depth})
    null.engine.add_request("r", [5], SamplingParams(temperature=0.0, max_tokens=9))
    null.run()
    assert null.engine._pipeline.num_inflight == 0
    # The prefill, the step that gave the end, and those launched before it was known.
    assert null.engine.stats().num_steps == 2 + depth


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_step_is_launched_for_tokens_that_are_certain_to_be_the_last(
    depth: int, make_null: MakeNull
) -> None:
    null = make_null(**{DEPTH: depth})
    null.engine.add_request("r", [5], endless(5))
    null.run()
    assert null.engine.stats().num_steps == 5


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_at_every_step(depth: int, make_null: MakeNull) -> None:
    for num_steps in range(12):
        null = make_null(**{DEPTH: depth})
        for name in ("out", "stays"):
            null.engine.add_request(name, [5] * 6, endless(8))
        seen: dict[str, RequestOutput] = {}
        for _ in range(num_steps):
            seen |= {output.request_id: output for output in null.engine.step()}
        null.engine.abort("out")
        results = seen | null.run()
        (out,), (stays,) = results["out"].outputs, results["stays"].outputs
        assert stays.token_ids == counted(8)
        if "out" in seen:
            assert out.token_ids == seen["out"].outputs[0].token_ids
        assert out.token_ids == counted(len(out.token_ids))
        ran_out = len(out.token_ids) == 8
        assert out.finish_reason is (FinishReason.LENGTH if ran_out else FinishReason.ABORT)


def test_abort_of_the_last_request_leaves_the_device_idle(make_null: MakeNull) -> None:
    null = make_null(**{DEPTH: 2})
    null.engine.add_request("r", [5] * 6, endless(50))
    steps(null, 5)
    null.engine.abort("r")
    null.check_idle()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_drafts", [0, 1, 3, 5])
def test_preemption_at_every_third_step(depth: int, max_drafts: int, make_null: MakeNull) -> None:
    """P34."""
    null = make_null(RandomScript(3, 300), max_drafts=max_drafts, **{DEPTH: depth})
    undisturbed = make_null(RandomScript(3, 300), max_drafts=max_drafts, **{DEPTH: 0})
    for each in (null, undisturbed):
        for index in range(6):
            each.engine.add_request(f"r{index}", [5] * (1 + 3 * index), endless(30))
    results: dict[str, RequestOutput] = {}
    for step in range(400):
        running = null.engine._scheduler.running
        if step % 3 == 2 and running:
            null.engine._scheduler.preempt(running[step % len(running)])
        results |= {output.request_id: output for output in null.engine.step()}
    assert null.engine.stats().num_preemptions >= 5
    null.check_idle()
    expected = undisturbed.run()
    assert {name: result.outputs for name, result in results.items()} == {
        name: result.outputs for name, result in expected.items()
    }


@pytest.mark.parametrize("end", ["finish", "abort", "preemption"])
def test_freed_blocks_are_not_read_when_the_device_is_late(end: str, make_null: MakeNull) -> None:
    """P35: what is freed is poisoned at once, and steps run only when the host waits for them."""
    null = make_null(**{DEPTH: 2, "cache.num_blocks": 12, "scheduler.max_num_seqs": 4})
    for index in range(8):
        null.engine.add_request(f"r{index}", [5] * 5, endless(10 + index))
    for step in range(20):
        null.engine.step()
        running = null.engine._scheduler.running
        if step % 4 == 3 and running and end == "abort":
            null.engine.abort(running[0].request.request_id)
        if step % 4 == 3 and running and end == "preemption":
            null.engine._scheduler.preempt(running[0])
    for result in null.run().values():
        assert result.outputs[0].token_ids == counted(len(result.outputs[0].token_ids))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_drafts_near_the_longest_length(depth: int, accepted: int, make_null: MakeNull) -> None:
    """P37."""
    null = make_null(
        CounterScript(20, 300, num_accepted=accepted),
        max_drafts=5,
        max_model_len=32,
        **{DEPTH: depth},
    )
    null.engine.add_request("r", [5] * 29, endless(20))
    (answer,) = null.run()["r"].outputs
    assert (answer.token_ids, answer.finish_reason) == (counted(3), FinishReason.LENGTH)


@pytest.mark.parametrize("depth", DEPTHS)
def test_as_many_tokens_as_asked_when_every_draft_is_right(depth: int, make_null: MakeNull) -> None:
    """P27."""
    null = make_null(CounterScript(20, 300, num_accepted=5), max_drafts=5, **{DEPTH: depth})
    null.engine.add_request("r", [5], endless(8))
    (answer,) = null.run()["r"].outputs
    assert answer.token_ids == counted(8)
    assert null.engine.stats().generated_tokens == 8


@pytest.mark.parametrize("depth", DEPTHS)
def test_one_that_fills_the_cache_fails_alone(depth: int, make_null: MakeNull) -> None:
    """P36."""
    null = make_null(max_drafts=3, **{DEPTH: depth, "cache.num_blocks": 5, "cache.block_size": 4})
    null.engine.add_request("large", [5] * 4, endless(40))
    null.engine.add_request("small", [5] * 4, endless(8))
    results = null.run()
    (large,), (small,) = results["large"].outputs, results["small"].outputs
    assert large.finish_reason is FinishReason.ERROR
    assert large.token_ids == counted(17)
    assert small.token_ids == counted(8)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_device_failure_reaches_the_caller(depth: int, make_null: MakeNull) -> None:
    null = make_null(ListScript({"r": [40, 41]}, {}), **{DEPTH: depth})
    null.engine.add_request("r", [5], endless(9))
    with pytest.raises(Exception, match="entry 2 was asked for"):
        null.run()
