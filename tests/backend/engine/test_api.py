"""`LLM.generate` and `LLM.stream` on a golden checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from deepinfer.api import LLM, Prompt
from deepinfer.config import EngineConfig
from deepinfer.device.errors import RequestError
from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(make_config: Callable[..., EngineConfig]) -> Iterator[LLM]:
    """A model that many tests ask."""
    with LLM(make_config(max_model_len=64)) as opened:
        yield opened


def _is_idle(llm: LLM) -> bool:
    stats = llm.engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)


def test_results_stand_in_the_order_of_prompts(llm: LLM) -> None:
    """P46."""
    wanted: list[Prompt] = [[20] * 40, [21], [22] * 20]
    lengths = [2, 5, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    results = llm.generate(wanted, params)
    assert [result.prompt_token_ids for result in results] == wanted
    assert [len(result.outputs[0].token_ids) for result in results] == lengths


def test_every_result_is_reported_once_as_it_ends(llm: LLM) -> None:
    asked: list[Prompt] = [[20] * 8, [50] * 70, [21]]
    params = [PARAMS.model_copy(update={"max_tokens": n}) for n in (6, 4, 2)]
    seen: list[str] = []
    results = llm.generate(asked, params, on_finished=lambda r: seen.append(r.request_id))
    # The refused one first, then the shortest answer.
    assert seen == [results[index].request_id for index in (1, 2, 0)]


@pytest.mark.parametrize("prompts", [[[20] * 8, [50] * 70, [21]], [[20] * 8, [21]]])
def test_a_callback_that_raises_leaves_no_request_behind(llm: LLM, prompts: list[Prompt]) -> None:
    def fail(_: RequestOutput) -> None:
        raise KeyError("callback")

    with pytest.raises(KeyError, match="callback"):
        llm.generate(prompts, PARAMS, on_finished=fail)
    assert _is_idle(llm)


def test_a_prompt_that_is_too_long_fails_alone(llm: LLM) -> None:
    """P38."""
    short, other = [30, 31, 32], [40, 41]
    asked: list[Prompt] = [short, [50] * 70, other]
    results = llm.generate(asked, PARAMS)
    assert results[1].error is not None
    assert "70 tokens" in results[1].error
    assert "64" in results[1].error
    assert results[1].outputs == []
    for result, prompt in ((results[0], short), (results[2], other)):
        assert result.outputs == llm.generate(prompt, PARAMS)[0].outputs


def test_text_and_token_prompts_are_alike(llm: LLM) -> None:
    asked: list[Prompt] = ["a,b,c", [100, 47, 101, 47, 102]]
    text, tokens = llm.generate(asked, PARAMS)
    assert (text.prompt, tokens.prompt) == ("a,b,c", None)
    assert text.outputs == tokens.outputs


def test_streamed_text_grows_to_the_final_one(llm: LLM) -> None:
    streamed = list(llm.stream("a,b,c", PARAMS))
    texts = [result.outputs[0].text for result in streamed]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert [len(result.outputs[0].token_ids) for result in streamed] == [1, 2, 3, 4]
    assert streamed[-1].outputs == llm.generate("a,b,c", PARAMS)[0].outputs


def test_leaving_a_stream_early_aborts_it(llm: LLM) -> None:
    stream = llm.stream("a,b,c", PARAMS)
    assert not next(stream).finished
    assert not _is_idle(llm)
    stream.close()
    assert _is_idle(llm)
    assert llm.generate("a,b,c", PARAMS)[0].outputs[0].finish_reason is FinishReason.LENGTH


def test_results_already_streamed_do_not_change(llm: LLM) -> None:
    stream = llm.stream("a,b,c", PARAMS)
    first = next(stream)
    before = (first.to_json(), list(first.outputs[0].token_ids))
    list(stream)
    assert (first.to_json(), first.outputs[0].token_ids) == before


def test_generating_inside_a_stream_loses_nothing(llm: LLM) -> None:
    stream = llm.stream("a,b,c", PARAMS)
    first = next(stream)
    llm.generate([[20] * 5], PARAMS)
    rest = list(stream)
    assert not first.finished
    assert rest[-1].outputs == llm.generate("a,b,c", PARAMS)[0].outputs


def test_two_streams_side_by_side_lose_nothing(llm: LLM) -> None:
    one, two = llm.stream("a,b,c", PARAMS), llm.stream([20] * 5, PARAMS)
    next(one), next(two)
    ends = [list(stream)[-1] for stream in (two, one)]
    alone = [llm.generate(prompt, PARAMS)[0] for prompt in ([20] * 5, "a,b,c")]
    assert [end.outputs for end in ends] == [result.outputs for result in alone]


@pytest.mark.parametrize(
    ("params", "priorities"), [([PARAMS], None), (PARAMS, [0]), (PARAMS, [0, 1, 2])]
)
def test_lists_must_fit_the_prompts(
    llm: LLM, params: SamplingParams | list[SamplingParams], priorities: list[int] | None
) -> None:
    with pytest.raises(RequestError, match="2 prompts"):
        llm.generate([[20], [21]], params, priorities=priorities)
    assert _is_idle(llm)


def test_nothing_asked_gives_nothing(llm: LLM) -> None:
    assert llm.generate([], PARAMS) == []
