"""The engine on the null device: tokens follow the script, and wrong memory is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from deepinfer.config import EngineConfig
from deepinfer.device.errors import ConfigError, ContractError
from deepinfer.device.null import CounterScript, ListScript, NullRuntime
from deepinfer.engine.null_memory import NullMemory, Owner, Place
from deepinfer.engine.null_runner import NullStepRunner
from deepinfer.engine.outputs import FinishReason
from deepinfer.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tests.unit.engine.conftest import NullEngine

MakeNull = Callable[..., "NullEngine"]
A, B = Owner("a", 0, 0), Owner("b", 0, 0)


def ends_after(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_answers_follow_the_script(make_null: MakeNull) -> None:
    null = make_null()
    for name, length in (("a", 1), ("b", 9), ("c", 30)):
        null.engine.add_request(name, [5] * length, ends_after(length + 2))
    results = null.run()
    for name, length in (("a", 1), ("b", 9), ("c", 30)):
        (answer,) = results[name].outputs
        assert answer.token_ids == list(range(20, 20 + length + 2))


def test_a_step_takes_the_time_the_costs_say(make_null: MakeNull) -> None:
    null = make_null()
    null.engine.add_request("r", [5] * 4, ends_after(3))
    null.run()
    # A prefill step of 4 rows, then two decode steps of one row.
    assert null.runtime.accounting().device_busy_us == 2004 + 2 * 1001


def test_a_script_ends_an_answer_with_the_end_token(make_null: MakeNull) -> None:
    null = make_null(ListScript({"r": [40, 41, 1, 99]}, {}))
    null.engine.add_request("r", [5], SamplingParams(temperature=0.0, max_tokens=9))
    (answer,) = null.run()["r"].outputs
    assert (answer.token_ids, answer.finish_reason) == ([40, 41, 1], FinishReason.STOP)


@pytest.mark.parametrize("max_drafts", [1, 3, 5])
@pytest.mark.parametrize("accepted", [0, 1, 3, 5])
def test_accepted_drafts_come_in_order_and_stop_at_the_limit(
    accepted: int, max_drafts: int, make_null: MakeNull
) -> None:
    null = make_null(CounterScript(20, 300, num_accepted=accepted), max_drafts=max_drafts)
    for name in "ab":
        null.engine.add_request(name, [5, 6, 7], ends_after(23))
    for result in null.run().values():
        assert result.outputs[0].token_ids == list(range(20, 43))
        assert result.outputs[0].finish_reason is FinishReason.LENGTH


def test_released_blocks_are_poisoned(make_null: MakeNull) -> None:
    null = make_null()
    null.engine.add_request("r", [5], ends_after(9))
    for _ in range(3):
        null.engine.step()
    (sequence,) = null.engine._scheduler.running
    null.runner.release(sequence.slot or 0, sequence.blocks)
    with pytest.raises(ContractError, match=r"r\[0\] .*window ring 0, which is poisoned"):
        null.run()


def test_log_probabilities_are_refused(make_null: MakeNull) -> None:
    null = make_null()
    null.engine.add_request("r", [5], SamplingParams(logprobs=1))
    with pytest.raises(ContractError, match="makes no logits"):
        null.engine.step()


def test_a_number_of_blocks_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"cache\.num_blocks"):
        NullStepRunner(NullRuntime(), CounterScript(20, 300), EngineConfig())


def memory_of_a() -> NullMemory:
    memory = NullMemory(2, window=2, replay_len=4, poisons=True)
    memory.write(A, Place(0, [4, 6]), [], [10, 11, 12])
    return memory


def test_memory_gives_back_what_was_written() -> None:
    memory = memory_of_a()
    memory.read(A, Place(0, [4, 6]), [10, 11, 12])
    # Another text may share what is the same, from where its own window begins.
    memory.read(B, Place(1, [4], floor=2), [10, 11])


@pytest.mark.parametrize(
    ("owner", "blocks", "tokens", "message"),
    [
        (A, [4, 6], [10, 99], "should hold token 99"),
        (A, [4, 6], [99, 11, 12], "should hold token 99"),
        (A, [4, 7], [10, 11, 12], "holds poison"),
        (A, [4], [10, 11, 12], "reserve blocks"),
        (A, [4, -1], [10, 11, 12], "reserve blocks"),
        (B, [4, 6], [10], r"ring 0, which is a\[0\].*'s, positions 0 to 2"),
    ],
)
def test_memory_refuses_what_was_not_written(
    owner: Owner, blocks: list[int], tokens: list[int], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        memory_of_a().read(owner, Place(0, blocks), tokens)


def test_equal_tokens_after_another_text_are_not_the_same() -> None:
    memory = memory_of_a()
    memory.write(B, Place(1, [8, 9]), [], [13, 11, 12])
    with pytest.raises(ContractError, match="position 2 of block 9, which should hold token 12"):
        memory.read(B, Place(1, [4, 9], floor=3), [10, 11, 12])


def test_a_row_of_somebody_else_is_not_written_over() -> None:
    memory, past = memory_of_a(), [10]
    with pytest.raises(ContractError, match=r"block 4, over a row of a\[0\]"):
        memory.write(B, Place(1, [4]), past[:0], [10])
    memory.write(B, Place(1, [4], write_from=2), [], [10, 11])
    memory.poison(None, [4])
    memory.write(B, Place(1, [4]), [], [10, 11])


def test_window_rows_from_before_the_replay_are_missing() -> None:
    memory = memory_of_a()
    memory.write(B, Place(1, [4, 6], floor=1, write_from=4), [10], [11, 12])
    memory.read(B, Place(1, [4, 6], floor=1), [10, 11])
    with pytest.raises(ContractError, match="reads positions 0 to 0 of window ring 1"):
        memory.read(B, Place(1, [4, 6]), [10])


def test_a_replay_that_is_too_short_shows() -> None:
    memory = memory_of_a()
    place = Place(1, [4, 6, 8], floor=1, write_from=4)
    memory.write(B, place, [10], [11, 12])
    with pytest.raises(ContractError, match="its windows are good from 3 on: replay 4 rows"):
        memory.write(B, place, [10, 11, 12], [13])


def test_poison_takes_effect_at_once() -> None:
    memory = memory_of_a()
    memory.poison(1, [6])
    memory.read(A, Place(0, [4, 6]), [10, 11])
    with pytest.raises(ContractError, match="holds poison"):
        memory.read(A, Place(0, [4, 6]), [10, 11, 12])
