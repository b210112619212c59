"""Life of requests: abort, time limit, priority, several answers, logprobs, ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.device.errors import RequestError
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams

MakeEngine = Callable[..., LLMEngine]
Ask = Callable[..., dict[str, RequestOutput]]
Drain = Callable[..., dict[str, list[RequestOutput]]]
EOS = 1
# For tests that count steps: each one's results are there when it returns.
PLAIN_LOOP = {"scheduler.async_depth": 0}
ENDLESS = SamplingParams(temperature=0.0, max_tokens=200)


def count_up(known: list[int]) -> int:
    """The length of what is known, as a token."""
    return 10 + len(known)


def test_abort_keeps_the_tokens_there_are(make_scripted: MakeEngine, drain: Drain) -> None:
    engine = make_scripted(count_up, **PLAIN_LOOP)
    engine.add_request("out", [5], ENDLESS)
    engine.add_request("stays", [6], SamplingParams(temperature=0.0, max_tokens=6))
    for _ in range(3):
        engine.step()
    engine.abort("out")
    results = drain(engine)
    (aborted,) = results["out"][-1].outputs
    assert (aborted.token_ids, aborted.finish_reason) == ([11, 12, 13], FinishReason.ABORT)
    assert results["stays"][-1].outputs[0].token_ids == [11 + i for i in range(6)]


def test_abort_of_a_waiting_request_never_runs_it(make_scripted: MakeEngine, drain: Drain) -> None:
    engine = make_scripted(count_up, **{"scheduler.max_num_seqs": 1})
    engine.add_request("first", [5], SamplingParams(temperature=0.0, max_tokens=4))
    engine.add_request("waits", [6], ENDLESS)
    engine.step()
    assert engine.stats().num_waiting == 1
    engine.abort("waits")
    assert engine.stats().num_waiting == 0
    (answer,) = drain(engine)["waits"][-1].outputs
    assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.ABORT)


def test_abort_of_a_preempted_request_leaks_nothing(
    make_scripted: MakeEngine, drain: Drain
) -> None:
    engine = make_scripted(count_up, **{"cache.block_size": 2, "cache.num_blocks": 8})
    for name, prompt in (("a", [5]), ("b", [6])):
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=12))
    while engine.stats().num_preemptions == 0:
        engine.step()
    engine.abort("b")
    results = drain(engine)
    assert results["a"][-1].outputs[0].token_ids == [11 + i for i in range(12)]
    assert results["b"][-1].outputs[0].finish_reason is FinishReason.ABORT


def test_abort_of_an_unknown_id_is_ignored(make_scripted: MakeEngine) -> None:
    engine = make_scripted(count_up)
    engine.abort("nobody")
    assert not engine.has_unfinished()


def test_a_time_limit_ends_a_request_with_what_it_has(
    make_scripted: MakeEngine, drain: Drain
) -> None:
    engine = make_scripted(count_up, **PLAIN_LOOP)
    engine.add_request("late", [5], ENDLESS, timeout_s=0.05)
    engine.add_request("free", [6], SamplingParams(temperature=0.0, max_tokens=6))
    engine.step()
    time.sleep(0.06)
    results = drain(engine)
    (answer,) = results["late"][-1].outputs
    assert (answer.token_ids, answer.finish_reason) == ([11], FinishReason.TIMEOUT)
    assert results["free"][-1].outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_time_limit_must_be_positive(timeout_s: float, make_scripted: MakeEngine) -> None:
    with pytest.raises(RequestError, match="timeout_s"):
        make_scripted(count_up).add_request("r", [5], ENDLESS, timeout_s=timeout_s)


def test_lower_priority_numbers_run_first_then_arrival(make_scripted: MakeEngine) -> None:
    engine = make_scripted(count_up, **{"scheduler.max_num_seqs": 1})
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for name, priority in (("last", 5), ("second", 0), ("third", 0), ("first", -1)):
        engine.add_request(name, [5], params, priority=priority)
    ended = []
    while engine.has_unfinished():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["first", "second", "third", "last"]


def test_an_open_id_cannot_be_used_twice(make_scripted: MakeEngine, ask: Ask) -> None:
    engine = make_scripted(count_up)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    engine.add_request("r", [5], params)
    with pytest.raises(RequestError, match="'r' is open already"):
        engine.add_request("r", [6], params)
    assert ask(engine, {})["r"].prompt_token_ids == [5]
    assert ask(engine, {"r": ([6], params)})["r"].prompt_token_ids == [6]


@pytest.mark.parametrize(
    ("prompt", "part"),
    [([], "empty"), ([320], "token id 320"), ([-1], "token id -1"), ([319], "image placeholder")],
)
def test_a_prompt_the_model_cannot_read_is_refused(
    prompt: list[int], part: str, make_scripted: MakeEngine
) -> None:
    engine = make_scripted(count_up)
    with pytest.raises(RequestError, match=part):
        engine.add_request("r", prompt, ENDLESS)
    assert not engine.has_unfinished()


def test_answers_end_each_on_their_own(make_scripted: MakeEngine, drain: Drain) -> None:
    engine = make_scripted(count_up, **{"scheduler.max_num_seqs": 1})
    engine.add_request("r", [5], SamplingParams(temperature=0.0, n=2, max_tokens=3))
    results = drain(engine)["r"]
    assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
    assert results[-2].outputs[0].finished
    assert not results[-2].outputs[1].finished
    assert [answer.token_ids for answer in results[-1].outputs] == [[11, 12, 13]] * 2


def test_prompt_logprobs_do_not_depend_on_chunks(make_engine: MakeEngine, ask: Ask) -> None:
    prompt = [(11 * i) % 300 + 5 for i in range(33)]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)
    plain = SamplingParams(temperature=0.0, max_tokens=2)
    found = []
    for chunk in (7, 64):
        engine = make_engine(**{"scheduler.prefill_chunk_tokens": chunk})
        # A neighbour on either side, so that rows of others lie between.
        asked = {"x": ([9, 8], plain), "r": (prompt, params), "y": (prompt[:20], plain)}
        entries = ask(engine, asked)["r"].prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        rest = [entry for entry in entries if entry is not None]
        assert [entry.token_id for entry in rest] == prompt[1:]
        assert all(len(entry.top) == 3 and entry.logprob < 0.0 for entry in rest)
        found.append(rest)
    assert found[0] == found[1]


def test_prompt_logprobs_survive_a_preemption(make_scripted: MakeEngine, ask: Ask) -> None:
    engine = make_scripted(count_up, **{"cache.block_size": 2, "cache.num_blocks": 9})
    params = SamplingParams(temperature=0.0, max_tokens=10, prompt_logprobs=0)
    results = ask(engine, {"a": ([5, 6, 7], params), "b": ([6, 7, 8], params)})
    assert engine.stats().num_preemptions >= 1
    for name, prompt in (("a", [5, 6, 7]), ("b", [6, 7, 8])):
        entries = results[name].prompt_logprobs
        assert entries is not None
        assert [None if entry is None else entry.token_id for entry in entries] == [
            None,
            *prompt[1:],
        ]
        assert results[name].outputs[0].token_ids == [13 + i for i in range(10)]


def test_a_stop_token_ends_and_is_named(make_scripted: MakeEngine, ask: Ask) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=[14])
    (answer,) = ask(make_scripted(count_up), {"r": ([5], params)})["r"].outputs
    assert answer.token_ids == [11, 12, 13, 14]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, 14)


def test_the_end_token_ends_unless_ignored(make_scripted: MakeEngine, ask: Ask) -> None:
    engine = make_scripted(lambda known: EOS)
    asked = {
        "ends": ([5], SamplingParams(temperature=0.0, max_tokens=3)),
        "goes on": ([6], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)),
    }
    results = ask(engine, asked)
    assert results["ends"].outputs[0].token_ids == [EOS]
    assert results["ends"].outputs[0].stop_reason is None
    assert results["goes on"].outputs[0].token_ids == [EOS] * 3


def test_min_tokens_holds_every_stop_back(make_scripted: MakeEngine, ask: Ask) -> None:
    asked = {
        "end": ([5], SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4)),
        "stop": (
            [6],
            SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, stop_token_ids=[EOS]),
        ),
    }
    for result in ask(make_scripted(lambda known: EOS), asked).values():
        (answer,) = result.outputs
        assert len(answer.token_ids) == 5
        assert EOS not in answer.token_ids[:4]
        assert answer.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_answers", [1, 2])
def test_a_prompt_row_that_is_not_a_number_ends_its_request(
    num_answers: int, make_scripted: MakeEngine, ask: Ask
) -> None:
    """P25, of prompt log probabilities: a result with NaN in it could not even be written."""

    def script(known: list[int]) -> int | Tensor:
        ill = known[0] == 5 and len(known) == 4
        return torch.full((320,), float("nan")) if ill else 20 + len(known)

    engine = make_scripted(
        script, **{"scheduler.prefill_chunk_tokens": 3, "cache.block_size": 2, "cache.prefix": True}
    )
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0, n=num_answers)
    asked = {"ill": ([5, 6, 7, 8, 9, 10], params), "well": ([6, 6, 7, 8, 9, 10], params)}
    results = ask(engine, asked)
    for answer in results["ill"].outputs:
        assert answer.finish_reason is FinishReason.ERROR
    assert "prompt token 4" in (results["ill"].error or "")
    assert "non-finite logits at step" in (results["ill"].error or "")
    assert len(results["ill"].prompt_logprobs or ()) == 4
    results["ill"].to_json()
    assert [answer.token_ids for answer in results["well"].outputs] == [[26, 27, 28]] * num_answers
    assert len(results["well"].prompt_logprobs or ()) == 6
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)
    # What the ill prompt has left is not there to be found.
    assert ask(engine, {"ill": asked["ill"]})["ill"].error is not None


def test_penalties_count_again_after_a_preemption(make_scripted: MakeEngine, ask: Ask) -> None:
    # The script likes 100 most, then 101, 102, ...: a presence penalty moves down the list.
    def script(known: list[int]) -> Tensor:
        row = torch.zeros(320)
        row[100:140] = torch.linspace(10.0, 9.0, 40)
        return row

    params = SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=2.0)
    asked = {"a": ([5], params), "b": ([6], params)}
    scarce = make_scripted(script, **{"cache.block_size": 2, "cache.num_blocks": 8})
    results = ask(scarce, asked)
    assert scarce.stats().num_preemptions >= 1
    for result in results.values():
        assert result.outputs[0].token_ids == [100 + i for i in range(12)]


def test_an_image_placeholder_is_never_chosen(make_scripted: MakeEngine, ask: Ask) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    assert (
        319 not in ask(make_scripted(lambda _: 319), {"r": ([5], params)})["r"].outputs[0].token_ids
    )


def test_min_tokens_holds_stop_strings_back(make_scripted: MakeEngine, ask: Ask) -> None:
    a = 100
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=3, stop="a")
    (answer,) = ask(make_scripted(lambda _: a), {"r": ([5], params)})["r"].outputs
    assert answer.token_ids == [a] * 3
    assert (answer.text, answer.finish_reason) == ("aa", FinishReason.STOP)


def test_requests_scored_in_one_step_keep_their_own_prompt_logprobs(
    make_engine: MakeEngine, ask: Ask
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    wanted = {"a": [20, 21, 22], "b": [40, 41, 42, 43, 44], "c": [60]}
    engine = make_engine(**{"scheduler.prefill_chunk_tokens": 64})
    together = ask(engine, {name: (prompt, params) for name, prompt in wanted.items()})
    for name, prompt in wanted.items():
        alone = ask(engine, {name: (prompt, params)})[name]
        assert together[name].prompt_logprobs == alone.prompt_logprobs


@pytest.mark.parametrize("length", [61, 62, 63])
def test_drafts_may_not_be_asked_about_beyond_the_last_block(
    length: int, make_engine: MakeEngine, ask: Ask
) -> None:
    """The answer ends in a full block, and so would its drafts in one that nobody has."""
    prompt, params = list(range(5, 5 + length)), SamplingParams(temperature=0.0, max_tokens=4)
    small = {"cache.block_size": 4}
    drafting = make_engine(**small | {"speculation.mode": "fixed", "speculation.max_drafts": 3})
    expected = ask(make_engine(**small), {"r": (prompt, params)})["r"].outputs
    assert ask(drafting, {"r": (prompt, params)})["r"].outputs == expected
