"""The engine: requests in, results out, one step at a time.

A step is schedule -> launch -> collect -> commit. In this version a step is collected as soon
as it is launched; the states in flight stand in a queue already, so that collecting later
changes `step` and nothing else.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from dataclasses import dataclass

from deepinfer.cache.block_pool import blocks_for
from deepinfer.config import EngineConfig
from deepinfer.device.backend import DECODE_GRAPHS, Backend
from deepinfer.device.errors import CapabilityError, RequestError
from deepinfer.device.hookspecs import BackendConfig
from deepinfer.device.numerics import Determinism
from deepinfer.device.registry import load_backend
from deepinfer.device.runtime import StepKind
from deepinfer.engine.batch_builder import build_step
from deepinfer.engine.commit import StopRules, commit
from deepinfer.engine.kv_sizing import num_kv_blocks
from deepinfer.engine.memory_plan import MemoryPlan
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.step_state import WorkerStepState
from deepinfer.engine.worker import StepModel, Worker
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.config import V41Config
from deepinfer.model.decode_graphs import DecodeGraphs
from deepinfer.model.loading import load_model
from deepinfer.text.tokenizer import TextTokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of now and since the engine began."""

    num_running: int
    num_waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    generated_tokens: int
    num_steps: int
    num_preemptions: int
    num_non_finite: int


class LLMEngine:
    """Scheduler, worker and text of one engine; not thread safe, one caller steps it."""

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        model: StepModel,
        model_config: V41Config,
        tokenizer: TextTokenizer,
        *,
        marks: tuple[str, ...] = (),
    ) -> None:
        """Put the parts together; `from_config` makes them.

        Args:
            config: resolved configuration.
            backend: device layer.
            model: backbone or a double of it.
            model_config: the model's configuration.
            tokenizer: of the checkpoint.
            marks: attached to every result, for example `random_weights`.
        """
        self.config, self.tokenizer, self.model_config = config, tokenizer, model_config
        limit = model_config.max_position_embeddings
        self.max_model_len = min(config.max_model_len or limit, limit)
        self._backend, self._marks = backend, marks
        scheduler = config.scheduler
        num_blocks = num_kv_blocks(config, model_config, backend, self.max_model_len)
        geometry = CacheGeometry.for_engine(
            model_config,
            block_size=config.cache.block_size,
            num_blocks=num_blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_tokens,
            async_depth=scheduler.async_depth,
        )
        plan = MemoryPlan.of(model_config, geometry, backend)
        plan.require_room()
        _log.info("%s", plan)
        self._worker = Worker(backend, model, geometry, model_config.vocab_size)
        self._scheduler = Scheduler(
            block_size=config.cache.block_size,
            num_blocks=num_blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_tokens,
            max_chunk_tokens=scheduler.max_chunk_tokens,
            on_release=self._worker.release,
        )
        eos = frozenset(tokenizer.eos_token_ids) or frozenset({model_config.eos_token_id})
        self._rules = StopRules(eos, self.max_model_len)
        image = model_config.image_token_id
        self._never = () if image is None else (image,)
        self._requests: dict[str, Request] = {}
        self._inflight: deque[WorkerStepState] = deque()
        self._arrivals = itertools.count()
        self._generated_tokens = self._num_steps = self._num_non_finite = 0

    @classmethod
    def from_config(cls, config: EngineConfig, *, backend: Backend | None = None) -> LLMEngine:
        """Load backend, checkpoint and tokenizer.

        Args:
            config: resolved configuration.
            backend: made by the caller, closed by the engine; None loads the one it names.
        Raises:
            CapabilityError, CheckpointError, ConfigError: what cannot be had, and why.
        """
        backend = backend or load_backend(
            BackendConfig(config.backend.name, config.numerics, dict(config.backend.options))
        )
        try:
            if config.determinism is not Determinism.OFF:
                _require_feature(backend, config.determinism)
            directory = config.checkpoint.directory
            random = config.checkpoint.random_weights
            loaded = load_model(
                directory,
                backend,
                max_positions=config.max_model_len,
                random_seed=config.checkpoint.seed if random else None,
            )
            tokenizer = TextTokenizer.from_directory(directory)
            model: StepModel = loaded.backbone
            if DECODE_GRAPHS in backend.features:
                limit = loaded.config.max_position_embeddings
                model = DecodeGraphs(
                    model, backend, max_key_len=min(config.max_model_len or limit, limit)
                )
            return cls(config, backend, model, loaded.config, tokenizer, marks=loaded.marks)
        except BaseException:
            backend.close()
            raise

    def close(self) -> None:
        """Drain the device and end its threads."""
        self._backend.close()

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among open requests.
            prompt: text, or token ids.
            params: what is asked.
            priority: lower runs first.
            timeout_s: seconds after which the request ends with what it has.
        Raises:
            RequestError: the request can never be served; the message names field and value.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is open already; give each its own")
        if timeout_s is not None and not timeout_s > 0:
            raise RequestError(f"timeout_s={timeout_s}; expected seconds above 0, or none")
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(token_ids)
        params.check_against(self.model_config.vocab_size, self.max_model_len)
        request = Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            priority=priority,
            arrival=next(self._arrivals),
            deadline_s=None if timeout_s is None else time.monotonic() + timeout_s,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        request.sequences = [
            Sequence(
                request,
                index,
                list(token_ids),
                OutputText(self.tokenizer, params),
                logprobs=None if params.logprobs is None else [],
            )
            for index in range(params.n)
        ]
        self._requests[request_id] = request
        for sequence in request.sequences:
            self._scheduler.add(sequence)

    def _check_prompt(self, token_ids: list[int]) -> None:
        vocab_size, limit = self.model_config.vocab_size, self.max_model_len
        if not token_ids:
            raise RequestError("prompt is empty; give at least one token")
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"prompt holds token id {token_id}; expected ids from 0 to {vocab_size - 1}"
                )
            if token_id in self._never:
                raise RequestError(
                    f"prompt holds token id {token_id}, the image placeholder; this engine "
                    "serves text only"
                )
        if len(token_ids) >= limit:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens, max_model_len is {limit} for prompt and "
                f"answer together; expected at most {limit - 1}: shorten it or raise max_model_len"
            )
        pool = self._scheduler.blocks.num_blocks
        needed = blocks_for(len(token_ids) + 1, self._scheduler.block_size)
        if needed > pool:
            raise RequestError(
                f"KV capacity: a prompt of {len(token_ids)} tokens needs {needed} blocks of "
                f"{self._scheduler.block_size} tokens, the cache has {pool}; shorten it or raise "
                "cache.memory"
            )

    def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown or ended ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end_open(request, FinishReason.ABORT)

    def has_unfinished(self) -> bool:
        """Whether any request is open, or has news to hand out."""
        return bool(self._requests)

    def num_unfinished(self) -> int:
        """Open requests."""
        return len(self._requests)

    def stats(self) -> EngineStats:
        """Figures of now."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_blocks=scheduler.blocks.num_used,
            kv_total_blocks=scheduler.blocks.num_blocks,
            generated_tokens=self._generated_tokens,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_non_finite=self._num_non_finite,
        )

    def step(self) -> list[RequestOutput]:
        """Run one step and return the requests that changed, ended ones for the last time."""
        self._end_overdue()
        scheduled, starved = self._scheduler.schedule()
        for sequence in starved:
            self._starve(sequence)
        if scheduled.kind is not StepKind.EMPTY:
            for metadata in scheduled.sequences:
                if metadata.context_len == 0:
                    self._admit_to_device(metadata.sequence)
            built = build_step(
                scheduled,
                self.model_config,
                eos_token_ids=tuple(sorted(self._rules.eos_token_ids)),
                never_token_ids=self._never,
            )
            self._inflight.append(self._worker.launch(scheduled, built))
        while self._inflight:
            self._finish_step(self._inflight.popleft())
        return self._take_changed()

    def _admit_to_device(self, sequence: Sequence) -> None:
        params = sequence.request.params
        penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        if penalised:
            assert sequence.slot is not None  # it has just been admitted
            self._worker.start_penalties(
                sequence.slot, sequence.request.prompt_token_ids, sequence.output_token_ids
            )

    def _finish_step(self, state: WorkerStepState) -> None:
        output = self._worker.collect(state)
        before = sum(m.sequence.num_output_tokens for m in state.scheduled.sequences)
        ended = commit(state, output, self._rules)
        after = sum(m.sequence.num_output_tokens for m in state.scheduled.sequences)
        self._generated_tokens += after - before
        self._num_steps += 1
        for sequence in ended:
            self._num_non_finite += sequence.finish_reason is FinishReason.ERROR
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.text.finish()
        sequence.request.changed = True
        self._scheduler.finish(sequence)

    def _end_open(self, request: Request, reason: FinishReason) -> None:
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                self._end(sequence)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for request in self._requests.values():
            if request.deadline_s is not None and now >= request.deadline_s:
                self._end_open(request, FinishReason.TIMEOUT)

    def _starve(self, sequence: Sequence) -> None:
        pool = self._scheduler.blocks.num_blocks
        sequence.finish_reason = FinishReason.ERROR
        sequence.error = (
            f"KV capacity: request {sequence.request.request_id} reached "
            f"{len(sequence.token_ids)} tokens and the whole cache holds "
            f"{pool * self._scheduler.block_size}; raise cache.memory or lower max_tokens"
        )
        self._end(sequence)

    def _take_changed(self) -> list[RequestOutput]:
        outputs = []
        for request in list(self._requests.values()):
            if not request.changed:
                continue
            request.changed = False
            outputs.append(self._output_of(request))
            if request.finished:
                del self._requests[request.request_id]
        return outputs

    def _output_of(self, request: Request) -> RequestOutput:
        completions = [
            CompletionOutput(
                index=sequence.index,
                token_ids=sequence.output_token_ids,
                text=sequence.text.text,
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
            prompt_logprobs=None
            if request.prompt_logprobs is None
            else list(request.prompt_logprobs),
            error=errors[0] if errors else None,
            marks=self._marks,
        )


def _require_feature(backend: Backend, determinism: Determinism) -> None:
    if determinism.value not in backend.features:
        raise CapabilityError(
            f"determinism {determinism.value} is not a feature of backend {backend.name}; it "
            f"declares {sorted(backend.features)}: set determinism to off or choose another backend"
        )
