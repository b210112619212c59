"""What the engine reports about a request: answers, their logprobs, and how they ended."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from deepinfer.device.errors import RequestError


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # end token, stop token or stop string; `stop_reason` says which
    LENGTH = "length"  # max_tokens or the context
    ABORT = "abort"  # the user withdrew the request
    ERROR = "error"  # `error` says what happened
    TIMEOUT = "timeout"  # the request's own time limit

    @property
    def is_answer(self) -> bool:
        """Whether the answer is complete, as opposed to cut short by an accident."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probability of one chosen (or prompt) token and of the most likely ones.

    `rank` is 1 for the most likely token. `top` holds (token id, logprob) from high to low, as
    many as were asked for; the chosen token is in it only when it belongs there.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Strict JSON form; an impossible token (minus infinity) has logprob null."""
        return {
            "token_id": self.token_id,
            "logprob": json_logprob(self.logprob),
            "rank": self.rank,
            "top": [[token_id, json_logprob(value)] for token_id, value in self.top],
        }


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` answers so far: everything is cumulative, not a delta.

    `text` never ends in half a character, and never holds what may still turn out to be a stop
    string; `token_ids` holds every token, also those whose text was cut. `stop_reason` is the
    stop string or token id that ended the answer, None for the model's own end token.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None

    def to_json(self) -> dict[str, Any]:
        """Strict JSON form."""
        logprobs = self.logprobs
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "logprobs": None if logprobs is None else [entry.to_json() for entry in logprobs],
            "finish_reason": None if self.finish_reason is None else self.finish_reason.value,
            "stop_reason": self.stop_reason,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """State of one request, as returned to whoever asked.

    `prompt` is None when the request came as token ids. `prompt_logprobs` has one entry for each
    prompt token, the first None (nothing precedes it). `num_cached_tokens` counts prompt tokens
    that were not computed again. `marks` names what makes the result special, for example random
    weights.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    marks: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Strict JSON form.

        Raises:
            RequestError: a logprob is NaN.
        """
        entries = self.prompt_logprobs
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [output.to_json() for output in self.outputs],
            "finished": self.finished,
            "prompt_logprobs": None
            if entries is None
            else [None if entry is None else entry.to_json() for entry in entries],
            "error": self.error,
            "num_cached_tokens": self.num_cached_tokens,
            "marks": list(self.marks),
        }


def json_logprob(value: float) -> float | None:
    """A logprob as strict JSON can hold it: minus infinity (an impossible token) becomes None.

    Raises:
        RequestError: the value is NaN or plus infinity, which no token can have.
    """
    if value == -math.inf:
        return None
    if not math.isfinite(value):
        raise RequestError(
            f"logprob={value}: expected a number up to 0 or minus infinity; "
            "the model returned non-finite logits for this request"
        )
    return value
