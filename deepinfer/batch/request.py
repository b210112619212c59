"""One line of a batch file as a request."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.device.errors import RequestError
from deepinfer.engine.sampling_params import InvalidFieldError, SamplingParams, unknown_field

COMPLETIONS_URL = "/v1/completions"
_ENVELOPE_FIELDS = ("custom_id", "method", "url", "body")
_OWN_FIELDS = ("model", "prompt", "echo", "priority", "timeout_s", "user")
# Fields of the API that say something only with another value than this one, and are refused then.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "suffix": (None, ""),
    "best_of": (None, 1),
}
_BODY_FIELDS = (*_OWN_FIELDS, *_NEUTRAL_VALUES, *SamplingParams.model_fields)


class ErrorCode(enum.StrEnum):
    """Why a line has no answer."""

    INVALID_UTF8 = "invalid_utf8"
    LINE_TOO_LONG = "line_too_long"
    INVALID_JSON = "invalid_json"
    INVALID_FIELD = "invalid_field"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    REQUEST_REFUSED = "request_refused"  # by the engine, before it ran
    REQUEST_FAILED = "request_failed"  # while it ran
    TIMEOUT = "timeout"
    ABORTED = "aborted"


class BadLineError(RequestError):
    """One line of a batch file that cannot become a request; the other lines are not affected."""

    def __init__(
        self,
        message: str,
        *,
        line_number: int,
        code: ErrorCode,
        custom_id: str | None = None,
        field: str | None = None,
    ) -> None:
        """Keep what an error record needs.

        Args:
            message: what is wrong, expected and to do.
            line_number: from 1, blank lines counted.
            code: kind of fault.
            custom_id: the user's name of the line, when it could be read.
            field: dotted name of the field at fault, if one is.
        """
        super().__init__(message)
        self.line_number = line_number
        self.code = code
        self.custom_id = custom_id
        self.field = field


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that asks for completions of one prompt."""

    line_number: int
    custom_id: str
    prompt: str | list[int]
    params: SamplingParams
    echo: bool = False
    priority: int = 0
    timeout_s: float | None = None


def parse_request(
    line_number: int, line: Mapping[str, Any], defaults: Mapping[str, Any]
) -> BatchRequest:
    """The request in one decoded line.

    In the body, null means "not given"; only for `max_tokens` it means "until the context is
    full". `model` and `user` are labels of the user and change nothing: a run has one model, and
    every answer names it. `echo` puts the prompt before the answer, with its logprobs if those
    of the answer are asked for.

    Args:
        line_number: from 1.
        line: the JSON object of the line.
        defaults: fields of `SamplingParams` for lines that do not give them.
    Raises:
        BadLineError: a field is missing, unknown or wrong.
    """
    custom_id = line.get("custom_id")
    try:
        if not isinstance(custom_id, str) or not custom_id:
            raise _wrong("custom_id", line, "a text that is not empty")
        for name in line:
            if name not in _ENVELOPE_FIELDS:
                raise unknown_field(name, _ENVELOPE_FIELDS)
        if line.get("method") != "POST":
            raise _wrong("method", line, "'POST'")
        if line.get("url") != COMPLETIONS_URL:
            raise _wrong("url", line, f"{COMPLETIONS_URL!r}, the only kind in this version")
        body = line.get("body")
        if not isinstance(body, dict):
            raise _wrong("body", line, "an object")
    except InvalidFieldError as error:
        raise _bad_line(error, line_number, custom_id, prefix="") from error
    try:
        return _parse_body(line_number, custom_id, body, defaults)
    except InvalidFieldError as error:
        raise _bad_line(error, line_number, custom_id, prefix="body.") from error


def _bad_line(
    error: InvalidFieldError, line_number: int, custom_id: object, *, prefix: str
) -> BadLineError:
    return BadLineError(
        str(error),
        line_number=line_number,
        code=ErrorCode.INVALID_FIELD,
        custom_id=custom_id if isinstance(custom_id, str) else None,
        field=prefix + error.field,
    )


def _parse_body(
    line_number: int, custom_id: str, body: Mapping[str, Any], defaults: Mapping[str, Any]
) -> BatchRequest:
    for name in body:
        if name not in _BODY_FIELDS:
            raise unknown_field(name, _BODY_FIELDS)
    for name, neutral in _NEUTRAL_VALUES.items():
        value = body.get(name)
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            raise InvalidFieldError(
                name, f"{name}={value!r} is not available here; leave the field out"
            )
    for name in ("model", "user"):
        if not isinstance(body.get(name), str | None):
            raise _wrong(name, body, "a text")
    echo = body.get("echo")
    if not isinstance(echo, bool | None):
        raise _wrong("echo", body, "true or false")
    priority = 0 if body.get("priority") is None else body["priority"]
    if type(priority) is not int:
        raise _wrong("priority", body, "an integer")
    timeout_s = body.get("timeout_s")
    if timeout_s is not None and (
        type(timeout_s) not in (int, float) or not 0 < timeout_s < math.inf
    ):
        raise _wrong("timeout_s", body, "seconds above 0")
    given = {
        name: value
        for name, value in body.items()
        if name in SamplingParams.model_fields and (value is not None or name == "max_tokens")
    }
    sampling = {**defaults, **given}
    if echo and "prompt_logprobs" not in sampling:
        sampling["prompt_logprobs"] = sampling.get("logprobs")
    return BatchRequest(
        line_number=line_number,
        custom_id=custom_id,
        prompt=_prompt(body),
        params=SamplingParams(**sampling),
        echo=bool(echo),
        priority=priority,
        timeout_s=None if timeout_s is None else float(timeout_s),
    )


def _prompt(body: Mapping[str, Any]) -> str | list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        raise InvalidFieldError(
            "prompt", f"prompt holds {len(prompt)} prompts; expected one a line, make more lines"
        )
    raise _wrong("prompt", body, "a text or a list of token ids (integers from 0), not empty")


def _wrong(name: str, holder: Mapping[str, Any], expected: str) -> InvalidFieldError:
    if name not in holder:
        return InvalidFieldError(name, f"{name} is missing; expected {expected}")
    value = holder[name]
    shown = repr(value) if len(repr(value)) <= 80 else f"{type(value).__name__} of another form"
    return InvalidFieldError(name, f"{name}={shown}: expected {expected}")
