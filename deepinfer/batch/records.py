"""One line of a result file: an answer or the reason why there is none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deepinfer.batch.request import BadLineError, BatchRequest, ErrorCode
from deepinfer.engine.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    TokenLogprob,
    json_logprob,
)
from deepinfer.text.detokenizer import StreamDetokenizer, TokenSpelling


class TokenNames(TokenSpelling, Protocol):
    """What is asked of a tokenizer here."""

    def token_text(self, token_id: int) -> str:
        """A printable name of one token."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        ...


def encode_record(record: Mapping[str, Any]) -> bytes:
    """A record as a line of strict JSON in UTF-8, newline included.

    Raises:
        ValueError: a number in it is not finite, which only a fault of ours can cause.
    """
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"


def error_record(error: BadLineError) -> dict[str, Any]:
    """The record of a line that did not become a request or was refused."""
    return _failure(
        error.line_number, error.custom_id, error.code, message=str(error), field=error.field
    )


def result_record(
    request: BatchRequest,
    output: RequestOutput,
    *,
    model_name: str,
    tokenizer: TokenNames,
    created: int,
) -> dict[str, Any]:
    """The record of a request that ended.

    An answer that an error, an abort or the time limit cut short makes an error record, which
    keeps what there was under `error.partial`.

    Args:
        request: the line.
        output: its final state.
        model_name: the model that answered.
        tokenizer: names tokens in logprobs, and spells a prompt of ids for `echo`.
        created: Unix time in seconds.
    Raises:
        RequestError: a logprob is NaN.
    """
    choices = [
        _choice(request, output, completion, tokenizer)
        for completion in sorted(output.outputs, key=lambda completion: completion.index)
    ]
    code, message = _accident(output)
    if code is not None:
        record = _failure(request.line_number, request.custom_id, code, message=message)
        record["error"]["partial"] = choices
        return record
    num_prompt_tokens = len(output.prompt_token_ids)
    num_completion_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    body: dict[str, Any] = {
        "id": f"cmpl-{request.line_number}",
        "object": "text_completion",
        "created": created,
        "model": model_name,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
    if output.marks:
        body["marks"] = list(output.marks)
    return {
        "id": f"batch_req_{request.line_number}",
        "custom_id": request.custom_id,
        "response": {"status_code": 200, "request_id": output.request_id, "body": body},
        "error": None,
    }


def _failure(
    line_number: int,
    custom_id: str | None,
    code: ErrorCode,
    *,
    message: str,
    field: str | None = None,
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line_number}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code.value, "message": message, "line": line_number, "field": field},
    }


_ACCIDENTS = {
    FinishReason.ERROR: (ErrorCode.REQUEST_FAILED, "the request failed"),
    FinishReason.TIMEOUT: (ErrorCode.TIMEOUT, "the time limit of the request was reached"),
    FinishReason.ABORT: (ErrorCode.ABORTED, "the request was aborted"),
}


def _accident(output: RequestOutput) -> tuple[ErrorCode | None, str]:
    for completion in output.outputs:
        if completion.finish_reason in _ACCIDENTS:
            code, what = _ACCIDENTS[completion.finish_reason]
            return code, output.error or completion.error or what
    if output.error is not None:
        return ErrorCode.REQUEST_FAILED, output.error
    return None, ""


def _choice(
    request: BatchRequest,
    output: RequestOutput,
    completion: CompletionOutput,
    tokenizer: TokenNames,
) -> dict[str, Any]:
    skip_special_tokens = request.params.skip_special_tokens
    echoed = ""
    if request.echo:
        echoed = (
            request.prompt
            if isinstance(request.prompt, str)
            else tokenizer.decode(request.prompt, skip_special_tokens=skip_special_tokens)
        )
    entries: list[TokenLogprob | None] | None = None
    token_ids: list[int] = []
    if completion.logprobs is not None:
        if request.echo and output.prompt_logprobs is not None:
            entries, token_ids = list(output.prompt_logprobs), list(output.prompt_token_ids)
        entries = [*(entries or []), *completion.logprobs]
        token_ids += completion.token_ids
    text = echoed + completion.text
    choice: dict[str, Any] = {
        "index": completion.index,
        "text": text,
        "token_ids": list(completion.token_ids),
        "logprobs": None,
        "finish_reason": completion.finish_reason and completion.finish_reason.value,
        "stop_reason": completion.stop_reason,
    }
    if entries is not None:
        offsets = _text_offsets(
            token_ids,
            StreamDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens),
            first=0 if len(token_ids) > len(completion.token_ids) else len(echoed),
            text_len=len(text),
        )
        choice["logprobs"] = _logprobs(token_ids, entries, offsets, tokenizer)
    if output.prompt_logprobs is not None:
        choice["prompt_logprobs"] = [
            None if entry is None else entry.to_json() for entry in output.prompt_logprobs
        ]
    return choice


def _logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    tokenizer: TokenNames,
) -> dict[str, Any]:
    """The completions form: parallel lists. null = impossible, or nothing precedes the token."""
    name = tokenizer.token_text
    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [
            None if entry is None else json_logprob(entry.logprob) for entry in entries
        ],
        "top_logprobs": [
            None
            if entry is None
            else {name(token_id): json_logprob(value) for token_id, value in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def _text_offsets(
    token_ids: Sequence[int], detokenizer: StreamDetokenizer, *, first: int, text_len: int
) -> list[int]:
    """Where each token's text begins in the choice's text, in characters; its end once cut off."""
    offsets = []
    place = first
    for token_id in token_ids:
        offsets.append(min(place, text_len))
        place += len(detokenizer.push(token_id))
    return offsets
