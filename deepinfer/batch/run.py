"""Driving the engine through a file of requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from deepinfer.batch.output_file import OutputFile, check_paths
from deepinfer.batch.progress import NoProgress, ProgressState, ProgressView
from deepinfer.batch.reader import count_requests, read_requests
from deepinfer.batch.records import TokenNames, error_record, result_record
from deepinfer.batch.request import BadLineError, BatchRequest, ErrorCode
from deepinfer.batch.summary import BatchSummary
from deepinfer.device.errors import ContractError, RequestError
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import InvalidFieldError, SamplingParams

logger = logging.getLogger(__name__)
DEFAULT_MAX_NUM_OPEN = 256
_SHOWN_EVERY_S = 0.1
"""Gathering the figures costs the host a visible part of a short step."""


class EngineStats(Protocol):
    """Figures of the engine that progress shows."""

    @property
    def kv_used_blocks(self) -> int:
        """KV blocks in use."""
        ...

    @property
    def kv_total_blocks(self) -> int:
        """KV blocks there are."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens generated since the engine began."""
        ...


class BatchEngine(Protocol):
    """What a batch run asks of an engine."""

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
        """Queue a request; raises `RequestError` when it can never be served."""
        ...

    def step(self) -> list[RequestOutput]:
        """Do one step; the requests that changed."""
        ...

    def has_unfinished(self) -> bool:
        """Whether any request is queued or running."""
        ...

    def abort(self, request_id: str) -> None:
        """Withdraw a request."""
        ...

    def stats(self) -> EngineStats:
        """Figures of now."""
        ...


def run_batch(
    engine: BatchEngine,
    input_path: Path,
    output_path: Path,
    *,
    model_name: str,
    tokenizer: TokenNames,
    defaults: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_num_open: int = DEFAULT_MAX_NUM_OPEN,
    progress: ProgressView | None = None,
    on_record: Callable[[BatchRequest | None, dict[str, Any]], None] | None = None,
) -> BatchSummary:
    """Answer every line of a file; each gets one record, written as soon as it is known.

    Records come in the order in which requests end: match them by `custom_id`. A line that
    cannot be read, is refused or fails gets an error record and disturbs nobody. Memory does not
    grow with the file, but for 16 bytes a line that find duplicate ids.

    Args:
        engine: idle; it is idle again afterwards.
        input_path: JSON lines for `/v1/completions`.
        output_path: file to make.
        model_name: goes into every answer.
        tokenizer: names tokens in logprobs.
        defaults: fields of `SamplingParams` for lines that do not give them.
        overwrite: replace an existing output file.
        max_num_open: most requests in the engine at once, queued ones included.
        progress: is told when requests have ended, else every tenth of a second; closed at the
            end.
        on_record: called with each record and its request (None for a line that is none).
    Raises:
        BatchFileError: the files cannot be used.
        KeyboardInterrupt: passed on after the open requests were withdrawn; what was written is
            whole.
    """
    check_paths(input_path, output_path, overwrite=overwrite)
    view = progress or NoProgress()
    try:
        with OutputFile(output_path, overwrite=overwrite) as output_file:

            def write(request: BatchRequest | None, record: dict[str, Any]) -> None:
                output_file.write(record)
                if on_record is not None:
                    on_record(request, record)

            run = _BatchRun(engine, write, view, model_name=model_name, tokenizer=tokenizer)
            run.num_total = count_requests(input_path)
            run.drive(read_requests(input_path, defaults=defaults), max_num_open)
    finally:
        view.close()
    return run.summary


class _BatchRun:
    """State of one run: the requests in the engine and the counts so far."""

    def __init__(
        self,
        engine: BatchEngine,
        write: Callable[[BatchRequest | None, dict[str, Any]], None],
        view: ProgressView,
        *,
        model_name: str,
        tokenizer: TokenNames,
    ) -> None:
        self.num_total = 0
        self.summary = BatchSummary()
        self._engine = engine
        self._write = write
        self._view = view
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._open: dict[str, BatchRequest] = {}
        self._begin_s = time.monotonic()
        self._generated_before = engine.stats().generated_tokens
        self._num_shown, self._due_s = -1, self._begin_s

    def drive(self, lines: Iterator[BatchRequest | BadLineError], max_num_open: int) -> None:
        """Fill the engine, step it, write what ended, until both file and engine are empty."""
        more_lines = True
        try:
            while more_lines or self._open:
                while more_lines and len(self._open) < max_num_open:
                    line = next(lines, None)
                    more_lines = line is not None
                    if line is not None:
                        self._begin(line)
                if self._open:
                    self._step()
                self._show()
        except KeyboardInterrupt:
            logger.warning("interrupted: %d open requests are withdrawn", len(self._open))
            for request_id in self._open:
                self._engine.abort(request_id)
            raise

    def _begin(self, line: BatchRequest | BadLineError) -> None:
        if isinstance(line, BadLineError):
            self._finish(None, error_record(line))
            return
        request_id = f"batch-{line.line_number}"
        try:
            self._engine.add_request(
                request_id,
                line.prompt,
                line.params,
                priority=line.priority,
                timeout_s=line.timeout_s,
                final_only=True,
            )
        except RequestError as error:
            self._finish(line, _refusal(line, error, ErrorCode.REQUEST_REFUSED))
        else:
            self._open[request_id] = line

    def _step(self) -> None:
        outputs = self._engine.step()
        if not outputs and not self._engine.has_unfinished():
            raise ContractError(
                f"the engine is idle but never ended requests {sorted(self._open)}; "
                "expected a finished output of each"
            )
        for output in outputs:
            if output.finished and output.request_id in self._open:
                self._end(self._open.pop(output.request_id), output)

    def _end(self, request: BatchRequest, output: RequestOutput) -> None:
        try:
            record = result_record(
                request,
                output,
                model_name=self._model_name,
                tokenizer=self._tokenizer,
                created=int(time.time()),
            )
        except RequestError as error:
            record = _refusal(request, error, ErrorCode.REQUEST_FAILED)
        self._finish(request, record)

    def _finish(self, request: BatchRequest | None, record: dict[str, Any]) -> None:
        self._write(request, record)
        self.summary.add(record)
        self.summary.seconds = time.monotonic() - self._begin_s

    def _show(self) -> None:
        now_s = time.monotonic()
        if self.summary.num_requests == self._num_shown and now_s < self._due_s:
            return
        self._num_shown, self._due_s = self.summary.num_requests, now_s + _SHOWN_EVERY_S
        stats = self._engine.stats()
        self._view.show(
            ProgressState(
                num_total=self.num_total,
                num_done=self.summary.num_requests,
                num_failed=self.summary.num_failed,
                generated_tokens=stats.generated_tokens - self._generated_before,
                kv_used_blocks=stats.kv_used_blocks,
                kv_total_blocks=stats.kv_total_blocks,
                elapsed_s=now_s - self._begin_s,
            )
        )


def _refusal(request: BatchRequest, error: RequestError, code: ErrorCode) -> dict[str, Any]:
    return error_record(
        BadLineError(
            str(error),
            line_number=request.line_number,
            code=code,
            custom_id=request.custom_id,
            field=f"body.{error.field}" if isinstance(error, InvalidFieldError) else None,
        )
    )
