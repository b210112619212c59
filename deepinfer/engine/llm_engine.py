"""The engine: requests in, results out, one step at a time.

What may come in is the intake's matter (`request_intake.py`), how steps run the pipeline's
(`pipeline.py`); here requests are kept while they are open, ended and handed out.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from deepinfer.cache.block_hash import chain_seed
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
from deepinfer.engine.engine_stats import EngineStats
from deepinfer.engine.frozen_heap import FrozenHeap
from deepinfer.engine.kv_sizing import longest_sequence
from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.pipeline import PipelineEvents, StepPipeline
from deepinfer.engine.prefill_hold import PrefillHold
from deepinfer.engine.prefix_reuse import PrefixReuse
from deepinfer.engine.replay_rule import ReplayRule
from deepinfer.engine.request_intake import RequestIntake
from deepinfer.engine.request_result import result_of
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
from deepinfer.speculation.metrics import SpeculationMetrics
from deepinfer.speculation.planner import VerifyPlanner
from deepinfer.text.tokenizer import TextTokenizer

_log = logging.getLogger(__name__)


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
            hold=PrefillHold(scheduler.prefill_wait_steps),
            reuse=self._prefix_reuse() if config.cache.prefix else None,
            on_release=runner.release,
        )
        eos = frozenset(tokenizer.eos_token_ids) or frozenset({model_config.eos_token_id})
        image = model_config.image_token_id
        never = () if image is None else (image,)
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
            StopRules(eos, never),
            PipelineEvents(
                on_change=self._add_news,
                on_end=self._end_by_tokens,
                on_starved=self._starve,
                on_no_memory=self._refuse_without_memory,
            ),
            self._timeline,
            async_depth=scheduler.async_depth,
            budgets=self._budgets,
        )
        self._requests: dict[str, Request] = {}
        self._timed: list[Request] = []  # of those, with a deadline
        self._news: list[Request] = []  # changed since the last step's outputs
        self._intake = RequestIntake(
            tokenizer,
            self._replay,
            vocab_size=model_config.vocab_size,
            max_model_len=self.max_model_len,
            num_blocks=runner.num_blocks,
            block_size=config.cache.block_size,
            never_token_ids=never,
        )
        self._num_non_finite = 0
        self._heap: FrozenHeap | None = None

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
            engine = cls(
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
            engine._heap = FrozenHeap()
            return engine
        except BaseException:
            backend.close()
            raise

    def close(self) -> None:
        """Drain the device and end its threads."""
        try:
            self._runner.close()
        finally:
            self._timeline.close()
            if self._heap is not None:
                self._heap.release()

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
        request = self._intake.request(
            request_id,
            prompt,
            params,
            priority=priority,
            timeout_s=timeout_s,
            final_only=final_only,
        )
        self._requests[request_id] = request
        if request.deadline_s is not None:
            self._timed.append(request)
        for sequence in request.sequences:
            self._scheduler.add(sequence)

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
        return EngineStats.of(
            self._scheduler,
            self._pipeline,
            self.speculation,
            num_non_finite=self._num_non_finite,
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

    def _add_news(self, changed: list[Request]) -> None:
        for request in changed:
            if not request.changed:
                request.changed = True
                self._news.append(request)

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
        self._add_news([request])
        self._scheduler.finish(sequence)

    def _end_open(self, request: Request, reason: FinishReason) -> None:
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                self._end(sequence)

    def _end_overdue(self) -> None:
        if not self._timed:
            return  # nearly always
        self._timed = [request for request in self._timed if not request.finished]
        now = time.monotonic()
        for request in self._timed:
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
        changed, self._news = self._news, []
        changed.sort(key=lambda request: request.arrival)
        outputs = []
        for request in changed:
            request.changed = False
            if request.finished:
                del self._requests[request.request_id]
            elif request.final_only:
                continue  # one of its answers has ended
            outputs.append(result_of(request, self._marks))
        return outputs


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
