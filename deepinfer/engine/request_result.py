"""What is told of a request: its answers so far."""

from __future__ import annotations

from deepinfer.engine.outputs import CompletionOutput, RequestOutput
from deepinfer.engine.sequence import Request

APPROXIMATE_PREFIX_MARK = "approximate_prefix"
"""Of results that follow cached blocks computed on windows rebuilt in mode bounded, if marked."""


def result_of(request: Request, marks: tuple[str, ...]) -> RequestOutput:
    """What is told of a request.

    Args:
        request: open, or ended just now.
        marks: of every result of the engine.
    """
    completions = [
        CompletionOutput(
            index=sequence.index,
            token_ids=sequence.output_token_ids,
            text=sequence.text.read(sequence.output_token_ids),
            logprobs=None if sequence.logprobs is None else list(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
        )
        for sequence in request.sequences
    ]
    errors = [sequence.error for sequence in request.sequences if sequence.error]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=completions,
        finished=request.finished,
        prompt_logprobs=None if request.prompt_logprobs is None else list(request.prompt_logprobs),
        error=errors[0] if errors else None,
        num_cached_tokens=request.num_cached_tokens or 0,
        marks=(*marks, APPROXIMATE_PREFIX_MARK) if request.took_approximate_blocks else marks,
    )
