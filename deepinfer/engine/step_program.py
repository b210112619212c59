"""What a step does on the device, in the order of the compute stream and without the host.

    forward   inputs corrected by the results in the ring, then the model
    finish    tokens decided, results left in the ring, context injected, drafts made

Between the two the host has its say about sampling. Both only issue work on tensors, so that they
may be run as they are or captured. Padding requests have no rows, the spare row of the ring and
the spare slot of drafts; what is written there nobody reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.ops import state
from deepinfer.device.ops.sampling import Logprobs, SampleWork
from deepinfer.device.ops.state import StepInputs, StepResults
from deepinfer.device.runtime import StepKind, run_on
from deepinfer.engine.draft_rounds import Anchors, DraftModel, DraftRounds
from deepinfer.engine.logit_rows import LogitRows
from deepinfer.engine.packed_results import num_columns, pack_results
from deepinfer.engine.sampler import Sampled, Sampler, StepDrafts
from deepinfer.engine.sampling_batch import SamplingBatch
from deepinfer.engine.step_upload import DeviceStep
from deepinfer.model.caches import CacheGeometry, ModelCaches
from deepinfer.model.config import V41Config
from deepinfer.model.forwarded import Forwarded
from deepinfer.model.step_batch import StepBatch


class StepModel(Protocol):
    """What is run: the backbone, or a scripted double of it in tests."""

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches: ...

    def step(self, batch: StepBatch, caches: ModelCaches) -> Forwarded: ...


class Finished(NamedTuple):
    """What the host is told of a step.

    Attributes:
        results: [N, 4 + 4 * D] int64, see `pack_results`.
        logprobs: of the tokens, or None where nobody wants them.
    """

    results: Tensor
    logprobs: Logprobs | None


class StepProgram:
    """Model, sampler, drafts and the ring of results of one rank."""

    def __init__(
        self,
        backend: Backend,
        model: StepModel,
        caches: ModelCaches,
        config: V41Config,
        *,
        num_results: int,
        drafter: DraftModel | None,
        max_drafts: int,
    ) -> None:
        """Bind the ops and allocate the ring.

        Args:
            backend: device layer.
            model: backbone or a double of it.
            caches: of the model.
            config: of the model.
            num_results: rows of the ring; the one after them is spare.
            drafter: beside the model, or None.
            max_drafts: D drafts of a request, 0 without a drafter.
        Raises:
            CapabilityError: the backend lacks an op of sampling, verification or step correction.
        """
        num_slots = caches.geometry.max_num_seqs
        self._model, self._caches, self._max_drafts = model, caches, max_drafts
        self._device = backend.runtime.device
        self.spare_result, self.spare_slot = num_results, num_slots
        stream = backend.runtime.compute_stream
        self._results = run_on(
            stream, lambda: self._create_results(num_results + 1, config.history_len)
        )
        self.sampler = Sampler(
            backend, num_slots=num_slots, vocab_size=config.vocab_size, max_drafts=max_drafts
        )
        self._rounds: DraftRounds | None = None
        if drafter is not None:
            self._rounds = run_on(
                stream,
                lambda: DraftRounds(
                    drafter,
                    caches,
                    backend,
                    max_drafts=max_drafts,
                    vocab_size=config.vocab_size,
                ),
            )
        ops = backend.ops
        self._correct_inputs = ops[state.correct_inputs]
        self._next_inputs = ops[state.next_inputs]
        self._row_layout = ops[state.row_layout]

    def forward(self, step: DeviceStep) -> tuple[DeviceStep, Forwarded]:
        """Run the model on the true inputs of a step; the step with them, and what it leaves."""
        step = self._true_step(step)
        return step, self._model.step(step.batch, self._caches)

    def finish(
        self, step: DeviceStep, forwarded: Forwarded, controls: SamplingBatch, *, drafts: bool
    ) -> Finished:
        """Decide the step's tokens and leave what the next steps go on from.

        Args:
            step: as `forward` returned it.
            forwarded: what the forward left, logits of the rows that decide tokens.
            controls: of the requests that sample, on the device.
            drafts: whether any sequence can use drafts after this step.
        """
        rows, rounds = self._logit_rows(step), self._rounds
        slots = step.draft_slots.index_select(0, step.result_seqs)
        standing: StepDrafts | None = None
        if rounds is not None and step.batch.kind is StepKind.DECODE:
            standing = rounds.step_drafts(slots, controls.work)
        sampled: Sampled | None = None
        anchors = Anchors(slots, slots)  # of nobody
        if step.result_seqs.shape[0]:
            sampled = self.sampler.sample(forwarded.logits, rows, controls, standing)
            anchors = self._keep_results(step, sampled)
        draft_ids = slots.new_empty((slots.shape[0], 0))
        survival = draft_ids.float()
        if rounds is not None:
            num_final = step.batch.query_lens
            if standing is not None:
                num_final = anchors.positions - step.batch.context_lens
            rounds.advance(step, forwarded, num_final, anchors, controls if drafts else None)
            draft_ids, survival = rounds.draft_ids(slots), rounds.survival(slots)
        if sampled is None:
            return Finished(slots.new_empty((0, num_columns(self._max_drafts))), None)
        num_verified = (rows.starts.diff() - 1).clamp_min(0)
        results = pack_results(sampled.verified, num_verified, sampled.finite, draft_ids, survival)
        return Finished(results, sampled.logprobs)

    def allocate_draft_logits(self, work: SampleWork) -> None:
        """Have the logits of drafts that are drawn at random before such a step is captured."""
        if self._rounds is not None and work is not SampleWork.GREEDY:
            self._rounds.allocate_logits()

    def _create_results(self, num_rows: int, history_len: int) -> StepResults:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self._device)

        return StepResults(
            token_ids=zeros(num_rows, 1 + self._max_drafts),
            num_accepted=zeros(num_rows),
            context_lens=zeros(num_rows),
            history=zeros(num_rows, history_len),
        )

    def _true_step(self, step: DeviceStep) -> DeviceStep:
        """The step with its inputs corrected by the results it goes on from."""
        if step.batch.kind is not StepKind.DECODE:
            return step  # a prompt is known to the host
        host, rounds = _inputs(step.batch), self._rounds
        if rounds is None:
            draft_ids = step.remap.new_empty((step.remap.shape[0], 0))
        else:
            draft_ids = rounds.draft_ids(step.draft_slots)
            host = host._replace(query_lens=rounds.query_bounds(step, self._results))
        inputs = self._correct_inputs(host, draft_ids, step.limits, step.remap, self._results)
        return replace(step, batch=replace(step.batch, **inputs._asdict()))

    def _logit_rows(self, step: DeviceStep) -> LogitRows:
        batch = step.batch
        if batch.kind is StepKind.DECODE:
            num_rows = batch.input_ids.shape[0]
            layout = self._row_layout(batch.query_lens, batch.context_lens, num_rows)
            return LogitRows.verifying(layout, batch.max_query_len)
        stops = batch.context_lens + batch.query_lens
        return LogitRows.single(stops.index_select(0, step.result_seqs))

    def _keep_results(self, step: DeviceStep, sampled: Sampled) -> Anchors:
        """Leave what the next steps go on from in the ring."""
        rows, (tokens, accepted) = step.result_rows, sampled.verified
        after = self._next_inputs(
            _inputs(step.batch), step.result_seqs, accepted, kind=step.batch.kind
        )
        self._results.token_ids.index_copy_(0, rows, tokens)
        self._results.num_accepted.index_copy_(0, rows, accepted)
        self._results.context_lens.index_copy_(0, rows, after.context_lens)
        self._results.history.index_copy_(0, rows, after.history)
        newest = tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
        return Anchors(newest, after.context_lens)


def _inputs(batch: StepBatch) -> StepInputs:
    return StepInputs(batch.input_ids, batch.query_lens, batch.context_lens, batch.history)
