"""One line as a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from deepinfer.batch.request import BadLineError, BatchRequest, parse_request


def _parse(body: Mapping[str, object] | None = None) -> BatchRequest:
    return _parse_line(body={"prompt": "hello", **(body or {})})


def _parse_line(**changes: object) -> BatchRequest:
    """A line with some envelope fields changed, or left out (`...`)."""
    line: dict[str, object] = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "hello"},
        **changes,
    }
    return parse_request(7, {k: v for k, v in line.items() if v is not ...}, {})


@pytest.mark.parametrize(
    ("envelope", "field"),
    [
        ({"custom_id": ...}, "custom_id"),
        ({"custom_id": 5}, "custom_id"),
        ({"custom_id": ""}, "custom_id"),
        ({"method": ...}, "method"),
        ({"method": "GET"}, "method"),
        ({"url": ...}, "url"),
        ({"url": "/v1/chat/completions"}, "url"),
        ({"body": ...}, "body"),
        ({"body": []}, "body"),
        ({"bodi": {}}, "bodi"),
    ],
)
def test_fault_of_the_envelope_names_the_field(envelope: dict[str, object], field: str) -> None:
    with pytest.raises(BadLineError, match=field) as caught:
        _parse_line(**envelope)
    assert (caught.value.field, caught.value.line_number) == (field, 7)


def test_fault_names_the_custom_id_when_there_is_one() -> None:
    with pytest.raises(BadLineError) as caught:
        _parse_line(url=...)
    assert caught.value.custom_id == "a"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"priority": 1.5}, "priority"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": True}, "timeout_s"),
        ({"echo": 1}, "echo"),
        ({"model": 1}, "model"),
        ({"stream": True}, "stream"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_token": 5}, "max_token"),
    ],
)
def test_fault_of_the_body_names_the_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadLineError, match=field) as caught:
        _parse(body)
    assert caught.value.field == f"body.{field}"


def test_unknown_field_suggests_the_nearest() -> None:
    with pytest.raises(BadLineError, match="did you mean 'timeout_s'"):
        _parse({"timeouts": 5})


def test_all_fields_reach_the_request() -> None:
    request = _parse(
        {
            "model": "m",
            "user": "u",
            "stream": False,
            "best_of": 1,
            "n": 2,
            "logit_bias": {"5": -100},
            "stop": ["x"],
            "top_k": 3,
            "priority": -1,
            "timeout_s": 2,
            "echo": True,
            "logprobs": 1,
        }
    )
    assert (request.priority, request.timeout_s, request.echo) == (-1, 2.0, True)
    params = request.params
    assert (params.n, params.logit_bias, params.stop, params.top_k) == (2, {5: -100.0}, ["x"], 3)


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert _parse({"echo": True, "logprobs": 2}).params.prompt_logprobs == 2
    assert _parse({"logprobs": 2}).params.prompt_logprobs is None


def test_null_means_not_given_but_for_max_tokens() -> None:
    params = _parse({"temperature": None, "stop": None, "max_tokens": None}).params
    assert (params.temperature, params.stop, params.max_tokens) == (1.0, None, None)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [("x", "x"), (["x"], "x"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([5], [5]), ("", "")],
)
def test_forms_of_a_prompt(given: object, prompt: object) -> None:
    assert _parse({"prompt": given}).prompt == prompt
