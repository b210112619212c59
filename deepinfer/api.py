"""The Python interface: `LLM.generate`, `LLM.stream`, and `trace` for looking inside."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType

from torch import Tensor

from deepinfer.config import EngineConfig, override
from deepinfer.device.backend import Backend
from deepinfer.device.errors import RequestError
from deepinfer.device.runtime import StepKind
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.timeline import Timeline
from deepinfer.model.loading import load_model
from deepinfer.model.trace_run import trace_tokens
from deepinfer.model.tracing import TraceSink
from deepinfer.speculation.metrics import SpeculationMetrics

__all__ = ["LLM", "EngineConfig", "Prompt", "RequestOutput", "SamplingParams", "trace"]

Prompt = str | list[int]


class LLM:
    """An engine in this process.

    Example:
        >>> from deepinfer import LLM, SamplingParams
        >>> with LLM() as llm:
        ...     llm.generate(["Once upon a time"], SamplingParams(max_tokens=40))[0].outputs[0].text
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        timeline_file: Path | None = None,
        backend: Backend | None = None,
        **overrides: object,
    ) -> None:
        """Load the model.

        Args:
            config: resolved configuration; None takes the defaults.
            timeline_file: trace of host and device to write; None times nothing.
            backend: a backend made by the caller, in the configuration's numerics; `close`
                closes it. None loads the one that the configuration names.
            overrides: dotted or nested fields on top, for example `numerics="exact"` or
                `**{"cache.block_size": 32}`.
        Raises:
            CapabilityError, CheckpointError, ConfigError: what cannot be had, and why.
        """
        config = config or EngineConfig()
        self.config = override(config, overrides) if overrides else config
        self.engine = LLMEngine.from_config(
            self.config, backend=backend, timeline_file=timeline_file
        )
        self._ids = itertools.count()
        # Outputs of requests that another caller's steps produced: a generate inside an open
        # stream, two streams side by side. Only requests whose caller still waits have a box.
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        timeout_s: float | None = None,
        on_finished: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; results stand in the order of the prompts.

        Args:
            prompts: texts or lists of token ids; one alone is accepted too.
            params: for all prompts, or one for each; None takes `sampling` of the configuration.
            priorities: one per prompt, lower runs first.
            timeout_s: time limit of each request in seconds.
            on_finished: called with every result as it ends, bad requests first.

        Returns:
            One result per prompt. A bad request fails alone: its result has `error` set.
        """
        wanted = _as_list(prompts)
        each = self._params_for(params, len(wanted))
        if priorities is not None and len(priorities) != len(wanted):
            raise RequestError(
                f"{len(priorities)} priorities for {len(wanted)} prompts; give one each"
            )
        results: dict[str, RequestOutput] = {}
        ids = []
        for index, (prompt, own) in enumerate(zip(wanted, each, strict=True)):
            request_id = f"generate-{next(self._ids)}"
            ids.append(request_id)
            try:
                self.engine.add_request(
                    request_id,
                    prompt,
                    own,
                    priority=0 if priorities is None else priorities[index],
                    timeout_s=timeout_s,
                    final_only=True,
                )
            except RequestError as error:
                results[request_id] = _refused(request_id, prompt, error)
        open_ids = set(ids) - results.keys()
        self._inboxes.update((request_id, deque()) for request_id in open_ids)
        finished = on_finished or (lambda _: None)
        try:
            # Here, so that a callback that raises leaves no request behind.
            for refused in list(results.values()):
                finished(refused)
            while open_ids:
                self._step()
                for request_id in list(open_ids):
                    box = self._inboxes[request_id]
                    if box and box[-1].finished:
                        results[request_id] = box[-1]
                        self._inboxes.pop(request_id)
                        open_ids.discard(request_id)
                        finished(results[request_id])
                    box.clear()
        finally:
            for request_id in open_ids:
                self._withdraw(request_id)
        return [results[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Answer one prompt; yields its cumulative result after every step that changed it.

        Leaving the iterator early aborts the request.

        Raises:
            RequestError: the request cannot be served.
        """
        request_id = f"stream-{next(self._ids)}"
        self.engine.add_request(request_id, prompt, self._params_for(params, 1)[0])
        box = self._inboxes[request_id] = deque()
        finished = False
        try:
            while not finished:
                if not box:
                    self._step()
                while box and not finished:
                    output = box.popleft()
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self._withdraw(request_id)
            self._inboxes.pop(request_id, None)

    def _step(self) -> None:
        """One step; its outputs go to the callers that wait for them."""
        for output in self.engine.step():
            box = self._inboxes.get(output.request_id)
            if box is not None:
                box.append(output)

    def _withdraw(self, request_id: str) -> None:
        """Abort a request that nobody waits for any more."""
        self._inboxes.pop(request_id, None)
        self.engine.abort(request_id)

    @property
    def timeline(self) -> Timeline:
        """What host and device did so far, if a timeline file was named."""
        return self.engine.timeline

    @property
    def speculation(self) -> SpeculationMetrics | None:
        """What came of drafts so far; None without speculation."""
        return self.engine.speculation

    def close(self) -> None:
        """Free the device."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams(**self.config.sampling)
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling params for {count} prompts; give one each")
        return list(params)


def trace(
    config: EngineConfig,
    token_ids: Sequence[int],
    *,
    backend: Backend,
    kind: StepKind = StepKind.PREFILL,
    chunk: int | None = None,
    observer: TraceSink | None = None,
) -> dict[str, Tensor]:
    """Run one sequence through the model with every intermediate tensor kept.

    Args:
        config: names the checkpoint; its backend section is not used.
        token_ids: the sequence.
        backend: where it runs; the caller closes it.
        kind: PREFILL in chunks, or DECODE token by token.
        chunk: tokens per step; None: all at once (1 when decoding).
        observer: is told every tensor at once, in execution order.

    Returns:
        Tensors on the CPU by trace name, in execution order; `logits` [n, vocab] fp32 is last.
    Raises:
        RequestError: no token, an id outside the vocabulary, or too many tokens.
    """
    checkpoint = config.checkpoint
    loaded = load_model(
        checkpoint.directory,
        backend,
        max_positions=config.max_model_len,
        random_seed=checkpoint.seed if checkpoint.random_weights else None,
    )
    return trace_tokens(
        loaded,
        backend,
        token_ids,
        kind=kind,
        chunk=chunk,
        max_len=config.max_model_len,
        observer=observer,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [[entry for entry in prompts if isinstance(entry, int)]]
    return [entry for entry in prompts if not isinstance(entry, int)]


def _refused(request_id: str, prompt: Prompt, error: RequestError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[] if isinstance(prompt, str) else list(prompt),
        outputs=[],
        finished=True,
        error=str(error),
    )
