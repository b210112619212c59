"""Request parameters: defaults, ranges, messages."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from deepinfer.device.errors import RequestError
from deepinfer.engine.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    TokenLogprob,
)
from deepinfer.engine.sampling_params import InvalidFieldError, SamplingParams


def test_defaults_match_the_completions_api() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 1.0, 16)


def test_unknown_field_names_the_nearest_one() -> None:
    with pytest.raises(RequestError, match=r"'temprature'; did you mean 'temperature'"):
        SamplingParams.model_validate({"temprature": 1.0})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n", 0, "from 1 to 1024"),
        ("temperature", -0.1, "0 or more"),
        ("temperature", math.inf, "finite"),
        ("top_p", 1.5, "from 0 to 1"),
        ("top_p", math.nan, "from 0 to 1"),
        ("top_k", -2, "0 or -1"),
        ("min_p", 2.0, "from 0 to 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -2.5, "from -2 to 2"),
        ("logit_bias", {"x": 1.0}, "token ids"),
        ("logit_bias", {5: 101.0}, "from -100 to 100"),
        ("logit_bias", {5: math.nan}, "finite"),
        ("allowed_token_ids", [], "at least one"),
        ("allowed_token_ids", [3, -1], "integers from 0"),
        ("seed", 2**63, "64 bits"),
        ("max_tokens", 0, "from 1"),
        ("max_tokens", True, "from 1"),
        ("max_tokens", "5", "from 1"),
        ("min_tokens", -1, "from 0"),
        ("stop", "", "none of them empty"),
        ("stop", ["a", ""], "none of them empty"),
        ("logprobs", 21, "from 0 to 20"),
        ("ignore_eos", 1, "true or false"),
    ],
)
def test_refusal_names_field_and_allowed_range(field: str, value: Any, expected: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidFieldError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert expected in str(caught.value)


def test_refusal_of_an_element_names_the_element() -> None:
    with pytest.raises(RequestError, match=r"allowed_token_ids holds -7"):
        SamplingParams(allowed_token_ids=[1, -7])


def test_model_validate_refuses_the_same_way() -> None:
    with pytest.raises(InvalidFieldError, match="top_p=3"):
        SamplingParams.model_validate({"top_p": 3})


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        SamplingParams().n = 2


def test_top_p_zero_means_the_most_likely_token() -> None:
    assert SamplingParams(top_p=0.0).is_greedy


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-6}, True),
        ({"top_k": 1}, True),
        ({}, False),
        ({"temperature": 0.01}, False),
        ({"top_k": 0}, False),
    ],
)
def test_greedy_is_exactly_when_one_token_can_win(fields: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**fields).is_greedy is greedy


def test_decimal_text_is_a_logit_bias_id() -> None:
    assert SamplingParams.model_validate({"logit_bias": {"7": -100}}).logit_bias == {7: -100.0}


def test_logit_bias_refuses_one_id_in_two_spellings() -> None:
    with pytest.raises(RequestError, match="each once"):
        SamplingParams.model_validate({"logit_bias": {"7": 1, "07": 2}})


@pytest.mark.parametrize(("given", "kept"), [(True, 0), (False, None), (3, 3), (None, None)])
def test_logprobs_switch_means_the_chosen_token_only(given: Any, kept: int | None) -> None:  # noqa: ANN401
    assert SamplingParams(logprobs=given).logprobs == kept


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="detokenize=False"):
        SamplingParams(stop="END", detokenize=False)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"min_tokens=9 is more than max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_stop_strings_are_a_tuple_in_every_form() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"999999999": 5}},
        {"allowed_token_ids": [1, 999999999]},
        {"stop_token_ids": [999999999]},
    ],
)
def test_id_outside_the_vocabulary_is_named(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(InvalidFieldError, match="999999999") as caught:
        params.check_against(vocab_size=320, max_model_len=64)
    assert caught.value.field == next(iter(fields))


def test_last_id_of_the_vocabulary_is_served() -> None:
    SamplingParams(stop_token_ids=[319]).check_against(vocab_size=320, max_model_len=64)


def test_min_tokens_beyond_the_context_is_refused() -> None:
    params = SamplingParams(min_tokens=64, max_tokens=None)
    with pytest.raises(InvalidFieldError, match="min_tokens=64"):
        params.check_against(vocab_size=320, max_model_len=64)


def test_output_with_impossible_token_is_strict_json() -> None:
    entry = TokenLogprob(token_id=3, logprob=-math.inf, rank=9, top=((1, 0.0), (2, -math.inf)))
    completion = CompletionOutput(0, [3], "x", [entry], FinishReason.STOP, stop_reason=3)
    output = RequestOutput("r", None, [5], [completion], finished=True, prompt_logprobs=[None])
    read = json.loads(json.dumps(output.to_json(), allow_nan=False))
    assert read["outputs"][0]["logprobs"][0]["logprob"] is None
    assert read["outputs"][0]["logprobs"][0]["top"] == [[1, 0.0], [2, None]]
    assert read["outputs"][0]["finish_reason"] == "stop"


def test_nan_logprob_is_an_error_of_the_request() -> None:
    with pytest.raises(RequestError, match="non-finite"):
        TokenLogprob(token_id=3, logprob=math.nan, rank=1).to_json()
