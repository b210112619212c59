"""How one request wants its tokens chosen, when it wants to stop, and what it wants reported."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from deepinfer.device.errors import RequestError

# Below this, logits divided by the temperature may leave the float32 range; the limit is greedy.
GREEDY_BELOW_TEMPERATURE = 1e-4
MAX_LOGPROBS = 20
MAX_NUM_OUTPUTS = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0


def _integer_keys(value: object) -> object:
    """JSON objects have text keys, so decimal text is accepted as a token id."""
    if not isinstance(value, Mapping):
        return value
    keys = [int(k) if isinstance(k, str) and k.isdecimal() and k.isascii() else k for k in value]
    if len(set(keys)) != len(keys):
        raise ValueError("a token id is named twice")
    return dict(zip(keys, value.values(), strict=True))


def _switch_as_count(value: object) -> object:
    """The chat form of the request says true for "the chosen token only"."""
    if isinstance(value, bool):
        return 0 if value else None
    return value


FiniteFloat: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Probability: TypeAlias = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
Penalty: TypeAlias = Annotated[FiniteFloat, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
TokenId: TypeAlias = Annotated[int, Field(ge=0)]
Bias: TypeAlias = Annotated[FiniteFloat, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
LogitBias: TypeAlias = Annotated[dict[TokenId, Bias] | None, BeforeValidator(_integer_keys)]
StopString: TypeAlias = Annotated[str, Field(min_length=1)]
LogprobCount: TypeAlias = Annotated[
    Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_switch_as_count)
]


class InvalidFieldError(RequestError):
    """A field of a request is unknown, malformed, outside its range, or contradicts another."""

    def __init__(self, field: str, message: str) -> None:
        """Keep the name of the (first) field beside the message, which names it too."""
        super().__init__(message)
        self.field = field


class SamplingParams(BaseModel):
    """Everything about a request except its prompt; checked when made, unchangeable after.

    Choosing:
        n: number of answers, 1 to 1024. At temperature 0 the answers are identical (allowed).
        temperature: 0 or more; below 1e-4 the most likely token is taken (`is_greedy`).
        top_p: 0 to 1, share of probability kept; 0 keeps only the most likely token.
        top_k: number of most likely tokens kept; 0 and -1 keep all.
        min_p: 0 to 1, least probability kept, relative to the most likely token's.
        repetition_penalty: above 0; 1 changes nothing. Covers prompt and answer.
        presence_penalty, frequency_penalty: -2 to 2; 0 changes nothing. Cover the answer only.
        logit_bias: token id -> -100 to 100, added to the logits; ids may be decimal text.
        allowed_token_ids: the only ids that may be chosen; None allows all.
        seed: 64-bit signed integer; the same seed gives the same answer in any company. With
            speculation this takes a fixed number of drafts and `determinism=deterministic`.
    Stopping:
        max_tokens: 1 or more; None = until the context is full. 0 is refused: there is no
            answer to return. The default is that of the OpenAI completions API.
        min_tokens: no stop of any kind before so many tokens; at most `max_tokens`.
        stop: text (or several) that ends the answer; cut from it unless
            `include_stop_str_in_output`. Needs `detokenize`.
        stop_token_ids: ids that end the answer, besides the model's own end token.
        ignore_eos: the model's end token is an ordinary token.
    Reporting:
        logprobs, prompt_logprobs: None = none, 0 = the chosen token only, up to 20 = also so
            many most likely tokens. true means 0, false means None.
        detokenize: make text; without it only token ids are returned.
        skip_special_tokens: leave the spelling of special tokens out of the text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    n: int = Field(default=1, ge=1, le=MAX_NUM_OUTPUTS)
    temperature: Annotated[FiniteFloat, Field(ge=0.0)] = 1.0
    top_p: Probability = 1.0
    top_k: int = Field(default=0, ge=-1)
    min_p: Probability = 0.0
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0.0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=16, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: LogprobCount = None
    prompt_logprobs: LogprobCount = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    if not TYPE_CHECKING:  # type checkers keep the signature made from the fields

        def __init__(self, **fields: object) -> None:
            """Check the fields.

            Raises:
                InvalidFieldError: a field is unknown, of the wrong type, outside its range, or
                    contradicts another.
            """
            for name in fields:
                if name not in type(self).model_fields:
                    raise unknown_field(name, type(self).model_fields)
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise _explain(fields, error) from error

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidFieldError(
                "min_tokens",
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower min_tokens or raise max_tokens",
            )
        if self.stop_strings and not self.detokenize:
            raise InvalidFieldError(
                "stop",
                f"stop={self.stop!r} with detokenize=False: stop strings are found in text and "
                "none would be made; use stop_token_ids or set detokenize=True",
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether only the most likely token can be chosen, so that no randomness is needed."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change what comes next."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_against(self, vocab_size: int, max_model_len: int) -> None:
        """Refuse what this model cannot serve.

        Args:
            vocab_size: number of token ids of the model; valid ids are below it.
            max_model_len: longest sequence in tokens, prompt and answer together.
        Raises:
            InvalidFieldError: an id outside the vocabulary, more logprobs than tokens, or a
                `min_tokens` that no sequence can reach. A `max_tokens` beyond the context is
                allowed: the answer then ends with the context.
        """
        for name, ids in (
            ("logit_bias", self.logit_bias or {}),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidFieldError(
                        name,
                        f"{name} names token id {token_id}; expected ids from 0 to "
                        f"{vocab_size - 1} (the vocabulary has {vocab_size} tokens)",
                    )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise InvalidFieldError(
                    name,
                    f"{name}={count}; expected at most {vocab_size}, the size of the vocabulary",
                )
        if self.min_tokens >= max_model_len:
            raise InvalidFieldError(
                "min_tokens",
                f"min_tokens={self.min_tokens}; expected less than {max_model_len}, the longest "
                "sequence of this model (prompt and answer together)",
            )


def unknown_field(name: str, known: Iterable[str]) -> InvalidFieldError:
    """The error for a field that does not exist; names the nearest that does."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"expected one of: {', '.join(names)}"
    return InvalidFieldError(name, f"unknown request field {name!r}; {remedy}")


_TOKEN_IDS = "a list of token ids (integers from 0)"
_LOGPROBS = f"an integer from 0 to {MAX_LOGPROBS}, or null for none"
_SWITCH = "true or false"
_PENALTY = f"a finite number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
_EXPECTED = {
    "n": f"an integer from 1 to {MAX_NUM_OUTPUTS}",
    "temperature": "a finite number, 0 or more",
    "top_p": "a number from 0 to 1",
    "top_k": "an integer from 1, or 0 or -1 to keep all tokens",
    "min_p": "a number from 0 to 1",
    "repetition_penalty": "a finite number above 0",
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": "an object of token ids (from 0, each once) and finite numbers "
    f"from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
    "allowed_token_ids": f"{_TOKEN_IDS}, at least one; leave it out to allow all",
    "seed": "an integer of 64 bits with sign",
    "max_tokens": "an integer from 1, or null for no limit but the context",
    "min_tokens": "an integer from 0",
    "stop": "a text or a list of texts, none of them empty",
    "stop_token_ids": _TOKEN_IDS,
    "ignore_eos": _SWITCH,
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "detokenize": _SWITCH,
    "skip_special_tokens": _SWITCH,
    "include_stop_str_in_output": _SWITCH,
}


def _explain(fields: Mapping[str, Any], error: ValidationError) -> InvalidFieldError:
    """Name, offending value and allowed range of every field that pydantic refused, once each."""
    sentences: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        name, culprit = str(detail["loc"][0]), detail["input"]
        inside = culprit is not fields[name] and len(detail["loc"]) > 1
        value = f" holds {reprlib.repr(culprit)}" if inside else f"={reprlib.repr(culprit)}"
        sentences[name] = f"{name}{value}: expected {_EXPECTED[name]}"
    return InvalidFieldError(next(iter(sentences)), "; ".join(sentences.values()))
