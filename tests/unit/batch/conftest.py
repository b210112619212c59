"""A scripted engine and files for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deepinfer.device.errors import RequestError
from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.engine.sampling_params import InvalidFieldError, SamplingParams
from deepinfer.engine.timeline import Timeline
from deepinfer.text.tokenizer import TextTokenizer

CHECKPOINT = Path(__file__).parents[2] / "data/golden/tiny_a/checkpoint"


@dataclass(frozen=True, slots=True)
class ScriptedStats:
    """Made-up figures."""

    kv_used_blocks: int
    kv_total_blocks: int
    generated_tokens: int


@dataclass(slots=True)
class _Work:
    prompt: str | list[int]
    params: SamplingParams
    num_tokens: int = 0


@dataclass(slots=True)
class ScriptedEngine:
    """Gives each open request one token "a" a step; the text of a prompt may ask for trouble.

    "refuse" and "refuse field" are refused, "fail" and "timeout" end so after one token, "lost"
    is forgotten, "interrupt" interrupts the step.
    """

    open: dict[str, _Work] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    calls: list[tuple[str, SamplingParams, int, float | None]] = field(default_factory=list)
    max_num_open: int = 0
    num_generated: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    speculation: None = None

    def close(self) -> None:
        """Nothing to free."""

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        final_only: bool = False,
    ) -> None:
        """Queue."""
        assert final_only, "a batch run takes final results only"
        if prompt == "refuse":
            raise RequestError("prompt has 99 tokens; the context has 8")
        if prompt == "refuse field":
            raise InvalidFieldError("logit_bias", "logit_bias names token id 999999999")
        self.calls.append((request_id, params, priority, timeout_s))
        if prompt != "lost":
            self.open[request_id] = _Work(prompt, params)
        self.max_num_open = max(self.max_num_open, len(self.open))

    def has_unfinished(self) -> bool:
        """Whether any request is open."""
        return bool(self.open)

    def step(self) -> list[RequestOutput]:
        """One token for each."""
        outputs = [self._advance(request_id, work) for request_id, work in self.open.items()]
        for output in outputs:
            if output.finished:
                del self.open[output.request_id]
        return outputs

    def abort(self, request_id: str) -> None:
        """Forget."""
        self.aborted.append(request_id)
        self.open.pop(request_id, None)

    def stats(self) -> ScriptedStats:
        """Figures of now."""
        return ScriptedStats(len(self.open), 64, self.num_generated)

    def _advance(self, request_id: str, work: _Work) -> RequestOutput:
        if work.prompt == "interrupt":
            raise KeyboardInterrupt
        work.num_tokens += 1
        self.num_generated += work.params.n
        troubles = {"fail": FinishReason.ERROR, "timeout": FinishReason.TIMEOUT}
        reason = troubles.get(str(work.prompt))
        if reason is None and work.num_tokens == work.params.max_tokens:
            reason = FinishReason.LENGTH
        error = "non-finite logits at step 1" if reason is FinishReason.ERROR else None
        token_ids = [3 + ord("a")] * work.num_tokens
        return RequestOutput(
            request_id=request_id,
            prompt=work.prompt if isinstance(work.prompt, str) else None,
            prompt_token_ids=[9] * len(work.prompt),
            outputs=[
                CompletionOutput(index, token_ids, "a" * len(token_ids), None, reason, error=error)
                for index in reversed(range(work.params.n))
            ],
            finished=reason is not None,
            error=error,
        )


@pytest.fixture
def engine() -> ScriptedEngine:
    """A fresh scripted engine."""
    return ScriptedEngine()


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    """Of a tiny checkpoint; ids 3 to 258 are the 256 bytes."""
    return TextTokenizer.from_directory(CHECKPOINT)


@pytest.fixture
def line() -> Callable[..., bytes]:
    """Makes a good line from an id and fields of the body."""

    def make(custom_id: str, **body: Any) -> bytes:  # noqa: ANN401
        request = {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "hello", **body},
        }
        return json.dumps(request).encode() + b"\n"

    return make


@pytest.fixture
def input_file(tmp_path: Path) -> Callable[..., Path]:
    """Makes an input file of the given bytes, joined."""

    def make(*lines: bytes) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"".join(lines))
        return path

    return make
