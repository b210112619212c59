"""The engine: requests in, results out, one step at a time.

What a request is, when it may come in and what its result says is decided here; how steps run is
the pipeline's matter (`pipeline.py`).
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from deepinfer.cache.block_hash import chain_seed
from deepinfer.cache.block_pool import blocks_for
from deepinfer.cache.host_tier import HostTier
from deepinfer.cache.prefix_cache import HitRules, PrefixCache
from deepinfer.config import EngineConfig
from deepinfer.config.speculation import SpeculationMode
from deepinfer.device.backend import Backend
from deepinfer.device.errors import CapabilityError, ConfigError, RequestError
from deepinfer.device.hookspecs import BackendConfig
from deepinfer.device.numerics import Determinism
from deepinfer.device.registry import load_backend
from deepinfer.engine.cache_identity import cache_identity
from deepinfer.engine.commit import StopRules
from deepinfer.engine.draft_budgets import DomainOf, DraftBudgets
from deepinfer.engine.kv_sizing import longest_sequence
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.engine.pipeline import PipelineEvents, StepPipeline
from deepinfer.engine.prefix_reuse import PrefixReuse, PrefixStats
from deepinfer.engine.replay_rule import ReplayRule
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.round_costs import verify_planner
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.state_tier import StateTier
from deepinfer.engine.step_runner import StepRunner
from deepinfer.engine.timeline import Phase, RecordedTimeline, Timeline
from deepinfer.engine.trace_file import TraceFile
from deepinfer.engine.worker import Worker, num_drafts
from deepinfer.model.config import V41Config
from deepinfer.model.drafter import Drafter
from deepinfer.model.loading import load_model
from deepinfer.speculation.calibration import CALIBRATION_FILE, load_temperatures
from deepinfer.speculation.metrics import Places, SpeculationMetrics
from deepinfer.speculation.planner import VerifyPlanner
from deepinfer.text.tokenizer import TextTokenizer

_log = logging.getLogger(__name__)
APPROXIMATE_PREFIX_MARK = "approximate_prefix"
"""Of results that follow cached blocks computed on windows rebuilt in mode bounded, if marked."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of now and since the engine began.

    Attributes:
        num_running: sequences that hold memory.
        num_waiting: sequences that wait for it.
        kv_used_blocks: blocks that somebody holds.
        kv_idle_blocks: blocks that nobody holds and a later prompt may find.
        kv_total_blocks: blocks of the pool.
        generated_tokens: tokens of answers.
        num_steps: steps computed.
        num_preemptions: times that a sequence lost its memory.
        num_non_finite: answers ended by logits that nothing can be sampled from.
        prefix_queried_tokens: tokens of sequences whose beginning was looked up.
        prefix_hit_tokens: of these, tokens that were not computed again.
        replayed_tokens: tokens of hits that were computed again to rebuild windows.
        approximate_hit_tokens: of the hit tokens, those in hits on marked blocks.
        num_evicted_blocks: known blocks that were forgotten for their memory.
        host_used_bytes: bytes of blocks and windows in host memory.
        num_loaded_blocks: blocks that came back from there.
        num_loaded_windows: sequences whose windows came from there.
        num_rounds: decode steps times their sequences, with a drafter.
        drafted_by_place: drafts that those had, by place in the block; empty without a drafter.
        verified_by_place: of these, drafts that were verified.
        accepted_by_place: of these, drafts that were accepted.
    """

    num_running: int
    num_waiting: int
    kv_used_blocks: int
    kv_idle_blocks: int
    kv_total_blocks: int
    generated_tokens: int
    num_steps: int
    num_preemptions: int
    num_non_finite: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    replayed_tokens: int
    approximate_hit_tokens: int
    num_evicted_blocks: int
    host_used_bytes: int
    num_loaded_blocks: int
    num_loaded_windows: int
    num_rounds: int
    drafted_by_place: tuple[int, ...]
    verified_by_place: tuple[int, ...]
    accepted_by_place: tuple[int, ...]


class LLMEngine:
    """Scheduler, worker and text of one engine; not thread safe, one caller steps it."""

    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        model_config: V41Config,
        tokenizer: TextTokenizer,
        *,
        marks: tuple[str, ...] = (),
        timeline: Timeline | None = None,
        planner: VerifyPlanner | None = None,
        domain_of: DomainOf | None = None,
    ) -> None:
        """Put the parts together; `from_config` makes them.

        Args:
            config: resolved configuration.
            runner: what steps are launched on; the engine closes it.
            model_config: the model's configuration.
            tokenizer: of the checkpoint.
            marks: attached to every result, for example `random_weights`.
            timeline: is told what host and device do; None records nothing.
            planner: chooses how many drafts a step verifies; None: all that there are.
            domain_of: domain of a request by its id, for the metrics of speculation.
        """
        self.config, self.tokenizer, self.model_config = config, tokenizer, model_config
        self.max_model_len = longest_sequence(config, model_config)
        self._runner, self._marks = runner, marks
        self._replay = ReplayRule(config.replay, model_config)
        scheduler = config.scheduler
        self._scheduler = Scheduler(
            block_size=config.cache.block_size,
            num_blocks=runner.num_blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_tokens,
            max_chunk_tokens=scheduler.max_chunk_tokens,
            max_drafts=runner.max_drafts,
            shrinks_drafts=config.determinism is not Determinism.DETERMINISTIC,
            reuse=self._prefix_reuse() if config.cache.prefix else None,
            on_release=runner.release,
        )
        eos = frozenset(tokenizer.eos_token_ids) or frozenset({model_config.eos_token_id})
        image = model_config.image_token_id
        self._never = () if image is None else (image,)
        self._timeline = timeline or Timeline()
        self._budgets = None
        if runner.max_drafts:
            self._budgets = DraftBudgets(
                planner,
                max_num_seqs=scheduler.max_num_seqs,
                max_drafts=runner.max_drafts,
                domain_of=domain_of,
            )
        self._pipeline = StepPipeline(
            runner,
            self._scheduler,
            model_config,
            StopRules(eos, self._never),
            PipelineEvents(
                on_end=self._end_by_tokens,
                on_starved=self._starve,
                on_no_memory=self._refuse_without_memory,
            ),
            self._timeline,
            async_depth=scheduler.async_depth,
            budgets=self._budgets,
        )
        self._requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._num_non_finite = 0

    def _prefix_reuse(self) -> PrefixReuse:
        config, copies = self.config, self._runner.copies
        rules = HitRules(config.cache.block_size, self.model_config.sliding_window)
        seed = chain_seed(cache_identity(config) | {"record": copies.block_record})
        tier: StateTier | None = None
        if config.cache.host_memory_bytes:
            tier = StateTier(HostTier(config.cache.host_memory_bytes), copies)
        return PrefixReuse(
            PrefixCache(rules, seed),
            self._replay,
            config.replay,
            drafts=self._runner.max_drafts > 0,
            tier=tier,
        )

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        backend: Backend | None = None,
        timeline_file: Path | None = None,
        timed: bool = False,
        domain_of: DomainOf | None = None,
    ) -> LLMEngine:
        """Load backend, checkpoint and tokenizer.

        Args:
            config: resolved configuration.
            backend: made by the caller, closed by the engine; None loads the one it names.
            timeline_file: trace of host and device to write.
            timed: add up the times of host and device also without a file.
            domain_of: domain of a request by its id, for the metrics of speculation.
        Raises:
            CapabilityError, CheckpointError, ConfigError: what cannot be had, and why.
        """
        backend = backend or load_backend(
            BackendConfig(config.backend.name, config.numerics, dict(config.backend.options))
        )
        try:
            if config.determinism is not Determinism.OFF:
                _require_feature(backend, config.determinism)
            if config.speculation.max_drafts is not None and not config.speculation.is_on:
                _log.warning(
                    "speculation.max_drafts = %d has no effect while speculation.mode is off; "
                    "set it to fixed or dynamic", config.speculation.max_drafts,
                )  # fmt: skip
            directory = config.checkpoint.directory
            _check_model(config, V41Config.from_json(directory))
            random = config.checkpoint.random_weights
            loaded = load_model(
                directory,
                backend,
                max_positions=config.max_model_len,
                random_seed=config.checkpoint.seed if random else None,
                with_drafter=config.speculation.is_on,
                controls=config.measurement.controls,
            )
            if loaded.drafter is not None:
                _calibrate(loaded.drafter, config)
            tokenizer = TextTokenizer.from_directory(directory)
            planner = None
            if config.speculation.mode is SpeculationMode.DYNAMIC:
                max_drafts = num_drafts(config, loaded.config)
                planner = verify_planner(config, backend, loaded, max_drafts=max_drafts)
            worker = Worker.for_engine(
                config, backend, loaded.backbone, loaded.config, drafter=loaded.drafter
            )
            return cls(
                config,
                worker,
                loaded.config,
                tokenizer,
                marks=loaded.marks,
                planner=planner,
                domain_of=domain_of,
                timeline=RecordedTimeline(
                    backend.runtime.now_us, TraceFile(timeline_file) if timeline_file else None
                )
                if timed or timeline_file
                else None,
            )
        except BaseException:
            backend.close()
            raise

    def close(self) -> None:
        """Drain the device and end its threads."""
        self._runner.close()
        self._timeline.close()

    @property
    def speculation(self) -> SpeculationMetrics | None:
        """What came of drafts so far; None without a drafter."""
        return None if self._budgets is None else self._budgets.metrics

    @property
    def timeline(self) -> Timeline:
        """What host and device did so far, if it is recorded."""
        return self._timeline

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
        """Queue a request.

        Args:
            request_id: unique among open requests.
            prompt: text, or token ids.
            params: what is asked.
            priority: lower runs first.
            timeout_s: seconds after which the request ends with what it has.
            final_only: hand out one result, when it has ended, and none on the way.
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
            controls=RequestControls.of(params, self.model_config.vocab_size),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            priority=priority,
            arrival=next(self._arrivals),
            deadline_s=None if timeout_s is None else time.monotonic() + timeout_s,
            decoder_start=self._replay.decoder_start(len(token_ids), params),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            final_only=final_only,
        )
        request.sequences = [
            Sequence(
                request,
                index,
                list(token_ids),
                OutputText(self.tokenizer, params),
                max_len=self._longest(len(token_ids), params),
                rows=self._replay.cold(request.decoder_start),
                logprobs=None if params.logprobs is None else [],
            )
            for index in range(params.n)
        ]
        self._requests[request_id] = request
        for sequence in request.sequences:
            self._scheduler.add(sequence)

    def _longest(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        if params.max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, num_prompt_tokens + params.max_tokens)

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
        """End a request with what it has; unknown or ended ids are ignored.

        Waits for the device only when nobody else is left: then it is idle afterwards.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._end_open(request, FinishReason.ABORT)
            if not self._scheduler.has_work:
                self._pipeline.flush()

    def has_unfinished(self) -> bool:
        """Whether any request is open, or has news to hand out."""
        return bool(self._requests)

    def num_unfinished(self) -> int:
        """Open requests."""
        return len(self._requests)

    def stats(self) -> EngineStats:
        """Figures of now."""
        scheduler = self._scheduler
        reuse = PrefixStats() if scheduler.reuse is None else scheduler.reuse.stats
        tier = None if scheduler.reuse is None else scheduler.reuse.tier
        metrics = self.speculation
        places = Places(0) if metrics is None else metrics.places
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_blocks=scheduler.blocks.num_used,
            kv_idle_blocks=scheduler.blocks.num_idle,
            kv_total_blocks=scheduler.blocks.num_blocks,
            generated_tokens=self._pipeline.num_generated_tokens,
            num_steps=self._pipeline.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_non_finite=self._num_non_finite,
            prefix_queried_tokens=reuse.num_queried_tokens,
            prefix_hit_tokens=reuse.num_hit_tokens,
            replayed_tokens=reuse.num_replayed_tokens,
            approximate_hit_tokens=reuse.num_approximate_hit_tokens,
            num_evicted_blocks=scheduler.blocks.num_evicted,
            host_used_bytes=0 if tier is None else tier.tier.num_bytes,
            num_loaded_blocks=0 if tier is None else tier.num_loaded_blocks,
            num_loaded_windows=0 if tier is None else tier.num_loaded_windows,
            num_rounds=places.num_rounds,
            drafted_by_place=tuple(places.drafted.tolist()),
            verified_by_place=tuple(places.verified.tolist()),
            accepted_by_place=tuple(places.accepted.tolist()),
        )

    def step(self) -> list[RequestOutput]:
        """Launch a step and finish an older one.

        Returns:
            The requests that changed; those that ended, for the last time.
        """
        self._end_overdue()
        self._pipeline.advance()
        with self._timeline.phase(Phase.OUTPUT):
            return self._take_changed()

    def flush(self) -> None:
        """Finish the steps in flight; what they change is handed out by the next `step`."""
        self._pipeline.flush()

    def _end_by_tokens(self, sequence: Sequence) -> None:
        self._num_non_finite += sequence.finish_reason is FinishReason.ERROR
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        request = sequence.request
        if self._timeline.is_recording:
            self._timeline.mark(
                f"{request.request_id}[{sequence.index}] ended: {sequence.finish_reason}"
            )
        sequence.text.finish()
        request.changed = True
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

    def _refuse_without_memory(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = FinishReason.ERROR
        sequence.error = (
            f"device memory: request {sequence.request.request_id} stopped at "
            f"{len(sequence.token_ids)} tokens, as not even one row of it could be computed "
            f"({reason}); free memory on the device or lower cache.memory"
        )
        self._end(sequence)

    def _take_changed(self) -> list[RequestOutput]:
        outputs = []
        for request in list(self._requests.values()):
            if not request.changed or (request.final_only and not request.finished):
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
            num_cached_tokens=request.num_cached_tokens or 0,
            marks=(*self._marks, APPROXIMATE_PREFIX_MARK)
            if request.took_approximate_blocks
            else self._marks,
        )


def _calibrate(drafter: Drafter, config: EngineConfig) -> None:
    """Scale confidences by the checkpoint's temperatures, as far as the configuration says."""
    wanted, directory = config.speculation.calibration, config.checkpoint.directory
    if wanted is None and config.checkpoint.random_weights:
        return  # the file is about other weights
    if wanted is False:
        return
    temperatures = load_temperatures(directory, drafter.max_drafts)
    if temperatures is not None:
        drafter.calibrate(temperatures)
    elif wanted:
        raise ConfigError(
            f"speculation.calibration = true, but {directory} has no {CALIBRATION_FILE}; fit it or "
            "leave the setting out"
        )


def _check_model(config: EngineConfig, model_config: V41Config) -> None:
    """Refuse what the model cannot do, before its weights are read.

    Raises:
        ConfigError: a setting does not fit the model.
    """
    ReplayRule(config.replay, model_config)
    if config.speculation.is_on and model_config.num_nextn_predict_layers:
        num_drafts(config, model_config)


def _require_feature(backend: Backend, determinism: Determinism) -> None:
    if determinism.value not in backend.features:
        raise CapabilityError(
            f"determinism {determinism.value} is not a feature of backend {backend.name}; it "
            f"declares {sorted(backend.features)}: set determinism to off or choose another backend"
        )
