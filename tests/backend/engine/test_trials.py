"""Faults that other engines were reported for, tried on this one with a scripted model."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.device.errors import RequestError
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.sampling_params import InvalidFieldError, SamplingParams

MakeEngine = Callable[..., LLMEngine]
Ask = Callable[..., dict[str, RequestOutput]]
Drain = Callable[..., dict[str, list[RequestOutput]]]
Script = Callable[[list[int]], int | Tensor]
PROMPT = [50]
EOS = 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
A_B_C = [100, 47, 101, 47, 102]  # "a,b,c"
EMOJI = [243, 162, 155, 131]
HI, OK = [107, 108], [114, 110]


def replay(tokens: list[int], after: int = 1) -> Script:
    """Answers with these tokens, then the last one again and again."""
    return lambda known: tokens[min(len(known) - after, len(tokens) - 1)]


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams.model_validate({"temperature": 0.0, "max_tokens": 8} | fields)


def pieces(results: list[RequestOutput]) -> list[str]:
    """What each result adds to the text before it."""
    texts = ["", *(result.outputs[0].text for result in results)]
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before), "text that was handed out has changed"
    return [after[len(before) :] for before, after in itertools.pairwise(texts)]


def test_a_stop_string_over_several_tokens_is_cut_and_never_streamed(
    make_scripted: MakeEngine, drain: Drain
) -> None:
    """P14."""
    engine = make_scripted(replay(A_B_C))
    engine.add_request("r", PROMPT, greedy(stop=["b,c"]))
    results = drain(engine)["r"]
    (answer,) = results[-1].outputs
    assert answer.text == "a,"
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "b,c")
    assert answer.token_ids == A_B_C
    assert "".join(pieces(results)) == "a,"


def test_a_character_in_parts_is_streamed_whole(make_scripted: MakeEngine, drain: Drain) -> None:
    """P15."""
    engine = make_scripted(replay(EMOJI))
    engine.add_request("r", PROMPT, greedy(max_tokens=4))
    assert pieces(drain(engine)["r"]) == ["", "", "", "😀"]


def test_half_a_character_at_the_end_is_left_out(make_scripted: MakeEngine, ask: Ask) -> None:
    """P16."""
    result = ask(make_scripted(replay(EMOJI)), {"r": (PROMPT, greedy(max_tokens=1))})["r"]
    (answer,) = result.outputs
    assert (answer.text, answer.token_ids) == ("", EMOJI[:1])
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("skip", "text"), [(True, "hi"), (False, "hi<\uff5cend\u2581of\u2581sentence\uff5c>")]
)
def test_special_tokens_are_spelled_only_if_asked(
    skip: bool, text: str, make_scripted: MakeEngine, ask: Ask
) -> None:
    """P17."""
    engine = make_scripted(replay([*HI, EOS]))
    (answer,) = ask(engine, {"r": (PROMPT, greedy(skip_special_tokens=skip))})["r"].outputs
    assert (answer.text, answer.token_ids) == (text, [*HI, EOS])
    assert answer.finish_reason is FinishReason.STOP


def test_the_end_token_as_stop_token_cuts_no_character(make_scripted: MakeEngine, ask: Ask) -> None:
    """P18."""
    engine = make_scripted(replay([*OK, EOS]))
    (answer,) = ask(engine, {"r": (PROMPT, greedy(stop_token_ids=[EOS]))})["r"].outputs
    assert (answer.text, answer.finish_reason) == ("ok", FinishReason.STOP)


def test_a_seed_holds_beside_a_neighbour_without_one(make_engine: MakeEngine, ask: Ask) -> None:
    """P19."""
    engine = make_engine()
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=6)
    free = SamplingParams(temperature=0.8, max_tokens=6)
    alone = ask(engine, {"a": (A_B_C, seeded)})["a"].outputs[0].token_ids
    neighbours = set()
    for _ in range(4):
        results = ask(engine, {"b": (HI, free), "a": (A_B_C, seeded)})
        assert results["a"].outputs[0].token_ids == alone
        neighbours.add(tuple(results["b"].outputs[0].token_ids))
    assert len(neighbours) > 1


def test_answers_of_one_seed_differ_and_repeat(make_engine: MakeEngine, ask: Ask) -> None:
    """P20."""
    params = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = [ask(make_engine(), {"r": (A_B_C, params)})["r"].outputs for _ in range(2)]
    first, second = ([answer.token_ids for answer in run] for run in runs)
    assert [answer.index for answer in runs[0]] == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in first}) == 4
    assert first == second


def test_an_unknown_bias_id_fails_alone(make_scripted: MakeEngine, ask: Ask) -> None:
    """P23."""
    engine = make_scripted(replay(HI))
    with pytest.raises(InvalidFieldError, match="logit_bias names token id 999999999"):
        engine.add_request("bad", PROMPT, greedy(logit_bias={"999999999": 5.0}))
    results = ask(engine, {"good": (PROMPT, greedy(max_tokens=2))})
    assert results.keys() == {"good"}
    assert results["good"].outputs[0].token_ids == HI


def test_top_p_zero_is_greedy(make_scripted: MakeEngine, ask: Ask) -> None:
    """P24."""
    asked = {
        "cold": (PROMPT, greedy(top_p=0.0, max_tokens=2)),
        "hot": (PROMPT, SamplingParams(top_p=0.0, temperature=2.0, max_tokens=2)),
    }
    for result in ask(make_scripted(replay(HI)), asked).values():
        assert result.outputs[0].token_ids == HI


@pytest.mark.parametrize("runtime", ["inline", "thread"])
def test_logits_that_are_not_numbers_end_only_their_request(
    runtime: str, make_scripted: MakeEngine, ask: Ask
) -> None:
    """P25."""

    def script(known: list[int]) -> int | Tensor:
        if known[0] == 60 and len(known) == 4:
            return torch.full((320,), float("nan"))
        return 100 + len(known)

    engine = make_scripted(script, **{"backend.options": {"runtime": runtime}})
    results = ask(engine, {"well": ([61], GREEDY), "ill": ([60], GREEDY)})
    (ill,) = results["ill"].outputs
    assert ill.finish_reason is FinishReason.ERROR
    assert ill.token_ids == [101, 102, 103]
    assert ill.error is not None
    for part in ("non-finite logits", "step 3", "request ill"):
        assert part in ill.error
    assert results["ill"].error == ill.error
    assert results["well"].outputs[0].token_ids == [101 + i for i in range(8)]
    assert engine.stats().num_non_finite == 1


def test_one_token_is_the_least_answer(make_scripted: MakeEngine, ask: Ask) -> None:
    """P26."""
    with pytest.raises(InvalidFieldError, match="max_tokens=0"):
        greedy(max_tokens=0)
    result = ask(make_scripted(replay(HI)), {"r": (PROMPT, greedy(max_tokens=1))})["r"]
    assert result.outputs[0].token_ids == HI[:1]


def test_impossible_tokens_are_null_in_json(make_scripted: MakeEngine, ask: Ask) -> None:
    """P28."""
    row = torch.full((320,), float("-inf"))
    row[HI[0]] = 0.0
    params = greedy(max_tokens=1, logprobs=2, prompt_logprobs=2, top_k=1)
    result = ask(make_scripted(lambda _: row), {"r": (A_B_C, params)})["r"]
    assert result.prompt_logprobs is not None
    document = result.to_json()
    assert document["prompt_logprobs"][0] is None
    assert document["prompt_logprobs"][1]["logprob"] is None
    assert document["outputs"][0]["logprobs"][0]["logprob"] == 0.0
    assert document["outputs"][0]["logprobs"][0]["top"][1][1] is None


def test_logprobs_come_with_and_without_alternatives(make_engine: MakeEngine, ask: Ask) -> None:
    """P29."""
    asked = {
        "plain": (HI, greedy(logprobs=True, max_tokens=3)),
        "two": (HI, greedy(logprobs=2, max_tokens=3)),
        "none": (HI, greedy(max_tokens=3)),
    }
    results = ask(make_engine(), asked)
    plain, two = (results[name].outputs[0].logprobs for name in ("plain", "two"))
    assert results["none"].outputs[0].logprobs is None
    assert plain is not None
    assert two is not None
    assert [entry.top for entry in plain] == [()] * 3
    for bare, entry in zip(plain, two, strict=True):
        assert bare.logprob == entry.logprob < 0.0
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert len(entry.top) == 2
        assert entry.top[0][1] > entry.top[1][1]


@pytest.mark.parametrize("runtime", ["inline", "adversarial"])
def test_a_request_larger_than_the_cache_fails_alone(
    runtime: str, make_scripted: MakeEngine, ask: Ask
) -> None:
    """P36."""
    engine = make_scripted(
        lambda known: 100 + len(known),
        **{
            "cache.block_size": 4,
            "cache.num_blocks": 3,
            "backend.options": {"runtime": runtime},
        },
    )
    long, short = greedy(max_tokens=40), greedy(max_tokens=3)
    results = ask(engine, {"long": ([60], long), "next": ([61], short)})
    (answer,) = results["long"].outputs
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None
    assert "KV capacity" in answer.error
    assert answer.token_ids == [101 + i for i in range(12)]
    assert results["next"].outputs[0].token_ids == [101, 102, 103]
    with pytest.raises(RequestError, match="KV capacity"):
        engine.add_request("never", [60] * 12, short)
    assert ask(engine, {"after": ([62], short)})["after"].outputs[0].finish_reason is not None


def test_text_stops_without_text_are_refused() -> None:
    """P58."""
    with pytest.raises(InvalidFieldError, match="detokenize"):
        greedy(detokenize=False, stop=["x"])


def test_more_answers_than_sequences_complete(make_scripted: MakeEngine, drain: Drain) -> None:
    """P60."""
    engine = make_scripted(replay(HI), **{"scheduler.max_num_seqs": 4})
    engine.add_request("r", PROMPT, greedy(n=10, max_tokens=2))
    results = drain(engine, max_running=4)["r"]
    assert [answer.token_ids for answer in results[-1].outputs] == [HI] * 10


def test_a_prompt_may_leave_room_for_one_token(make_scripted: MakeEngine, ask: Ask) -> None:
    """P61."""
    engine = make_scripted(lambda _: HI[0], max_model_len=20)
    (answer,) = ask(engine, {"r": ([60] * 19, greedy())})["r"].outputs
    assert (answer.token_ids, answer.finish_reason) == (HI[:1], FinishReason.LENGTH)
    with pytest.raises(RequestError, match="20 tokens, max_model_len is 20"):
        engine.add_request("r", [60] * 20, greedy())
