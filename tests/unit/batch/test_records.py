"""Lines of the result file."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from deepinfer.batch.records import encode_record, error_record, result_record
from deepinfer.batch.request import BadLineError, BatchRequest, ErrorCode
from deepinfer.device.errors import RequestError
from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput, TokenLogprob
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.text.tokenizer import TextTokenizer


def _ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def _entry(token_id: int, logprob: float = -0.5, **more: Any) -> TokenLogprob:  # noqa: ANN401
    return TokenLogprob(token_id, logprob, rank=1, **more)


def _record(
    tokenizer: TextTokenizer,
    completion: CompletionOutput,
    *,
    prompt: str | list[int] = "p",
    echo: bool = False,
    **output: Any,  # noqa: ANN401
) -> dict[str, Any]:
    request = BatchRequest(4, "id", prompt, SamplingParams(), echo=echo)
    return result_record(
        request,
        RequestOutput(
            "batch-4",
            prompt if isinstance(prompt, str) else None,
            _ids(prompt) if isinstance(prompt, str) else prompt,
            [completion],
            finished=True,
            **output,
        ),
        model_name="tiny",
        tokenizer=tokenizer,
        created=1,
    )


def _choice(record: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = record["response"]["body"]["choices"][0]
    return choice


def test_answer_has_the_form_of_the_api(tokenizer: TextTokenizer) -> None:
    completion = CompletionOutput(0, _ids("ok"), "ok", None, FinishReason.STOP, stop_reason="x")
    record = _record(tokenizer, completion, num_cached_tokens=1)
    assert record["custom_id"] == "id"
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    assert (body["object"], body["model"], body["created"]) == ("text_completion", "tiny", 1)
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert "marks" not in body
    assert _choice(record) == {
        "index": 0,
        "text": "ok",
        "token_ids": _ids("ok"),
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "x",
    }


def test_marks_are_shown(tokenizer: TextTokenizer) -> None:
    completion = CompletionOutput(0, [5], "", None, FinishReason.STOP)
    record = _record(tokenizer, completion, marks=("random weights",))
    assert record["response"]["body"]["marks"] == ["random weights"]


def test_logprobs_are_parallel_lists(tokenizer: TextTokenizer) -> None:
    ids = _ids("aé")
    entries = [_entry(ids[0], top=((ids[0], -0.5), (9, -2.0))), _entry(ids[1]), _entry(ids[2])]
    completion = CompletionOutput(0, ids, "aé", entries, FinishReason.LENGTH)
    logprobs = _choice(_record(tokenizer, completion))["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert list(logprobs["top_logprobs"][0].values()) == [-0.5, -2.0]
    assert logprobs["top_logprobs"][1] == {}
    assert logprobs["text_offset"] == [0, 1, 1]


def test_offsets_of_tokens_cut_by_a_stop_string_are_the_end(tokenizer: TextTokenizer) -> None:
    ids = _ids("abc")
    completion = CompletionOutput(0, ids, "a", [_entry(i) for i in ids], FinishReason.STOP)
    assert _choice(_record(tokenizer, completion))["logprobs"]["text_offset"] == [0, 1, 1]


def test_impossible_token_is_null_in_strict_json(tokenizer: TextTokenizer) -> None:
    entry = _entry(70, -math.inf, top=((71, -math.inf),))
    completion = CompletionOutput(0, [70], "C", [entry], FinishReason.LENGTH)
    record = _record(tokenizer, completion, prompt_logprobs=[None, entry])
    read = json.loads(encode_record(record), parse_constant=pytest.fail)
    assert _choice(read)["logprobs"]["token_logprobs"] == [None]
    assert _choice(read)["logprobs"]["top_logprobs"] == [{"D": None}]
    assert _choice(read)["prompt_logprobs"][1]["logprob"] is None


def test_nan_is_an_error_of_the_request(tokenizer: TextTokenizer) -> None:
    completion = CompletionOutput(0, [70], "C", [_entry(70, math.nan)], FinishReason.LENGTH)
    with pytest.raises(RequestError, match="non-finite"):
        _record(tokenizer, completion)


def test_record_that_is_not_strict_json_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_record({"value": math.nan})


def test_encoded_record_is_one_line_of_utf8() -> None:
    data = encode_record({"text": "世\n界"})
    assert data.count(b"\n") == 1
    assert "世".encode() in data


@pytest.mark.parametrize("prompt", ["hé", _ids("hé")])
def test_echo_puts_the_prompt_first(tokenizer: TextTokenizer, prompt: str | list[int]) -> None:
    completion = CompletionOutput(0, _ids("!"), "!", None, FinishReason.LENGTH)
    assert _choice(_record(tokenizer, completion, prompt=prompt, echo=True))["text"] == "hé!"


def test_echo_with_logprobs_covers_the_prompt(tokenizer: TextTokenizer) -> None:
    completion = CompletionOutput(0, _ids("!"), "!", [_entry(36)], FinishReason.LENGTH)
    prompt_logprobs = [None, _entry(1), _entry(1)]
    record = _record(
        tokenizer, completion, prompt="hij", echo=True, prompt_logprobs=prompt_logprobs
    )
    logprobs = _choice(record)["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "j", "!"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


def test_echo_without_prompt_logprobs_shifts_the_offsets(tokenizer: TextTokenizer) -> None:
    completion = CompletionOutput(0, _ids("!?"), "!?", [_entry(36)] * 2, FinishReason.LENGTH)
    record = _record(tokenizer, completion, prompt="hij", echo=True)
    assert _choice(record)["logprobs"]["text_offset"] == [3, 4]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FinishReason.ERROR, "request_failed"),
        (FinishReason.TIMEOUT, "timeout"),
        (FinishReason.ABORT, "aborted"),
    ],
)
def test_accident_is_an_error_that_keeps_what_there_was(
    tokenizer: TextTokenizer, reason: FinishReason, code: str
) -> None:
    completion = CompletionOutput(0, _ids("ab"), "ab", None, reason)
    record = _record(tokenizer, completion, error="step 3 of request r")
    assert record["response"] is None
    assert (record["error"]["code"], record["error"]["line"]) == (code, 4)
    assert record["error"]["message"] == "step 3 of request r"
    assert record["error"]["partial"][0]["text"] == "ab"


def test_error_record_names_line_and_field() -> None:
    error = BadLineError(
        "url is missing",
        line_number=2,
        code=ErrorCode.INVALID_FIELD,
        custom_id="b",
        field="url",
    )
    assert error_record(error) == {
        "id": "batch_req_2",
        "custom_id": "b",
        "response": None,
        "error": {"code": "invalid_field", "message": "url is missing", "line": 2, "field": "url"},
    }
