"""Times of dummy rounds on the device: what the cost tables of the planner are measured with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.cache.block_pool import blocks_for
from deepinfer.device.backend import DECODE_GRAPHS, Backend
from deepinfer.device.ops import spec
from deepinfer.device.ops.sampling import SampleParams, SampleWork
from deepinfer.device.runtime import StepKind, run_on
from deepinfer.model.backbone import Backbone
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.decode_graphs import DecodeGraphs, row_tier
from deepinfer.model.draft_batch import DraftBatch
from deepinfer.model.draft_graphs import DraftGraphs, DraftModel
from deepinfer.model.drafter import Drafter
from deepinfer.model.step_batch import StepBatch

_BLOCK_SIZE = 64
_CONTEXT_LEN = 512
"""Tokens before each dummy request; a step's time depends little on it, its rows matter."""


class ModelStepTimer:
    """Runs dummy steps of a model and its drafter in caches of its own, one after another.

    Where the engine replays steps as graphs, so does it.

    Attributes:
        tiers: row counts that steps are padded to; empty without graphs.
    """

    def __init__(
        self,
        backend: Backend,
        backbone: Backbone,
        drafter: Drafter,
        *,
        max_num_seqs: int,
        max_drafts: int,
        max_model_len: int,
    ) -> None:
        """Allocate caches; all dummy requests share the blocks of one.

        Args:
            backend: where the model is.
            backbone: with taps.
            drafter: beside it.
            max_num_seqs: most requests of a step.
            max_drafts: most drafts of a request.
            max_model_len: longest sequence that the model was loaded for, in tokens.
        """
        self._runtime, self._backbone = backend.runtime, backbone
        self._drafter: DraftModel = drafter
        self._model: Backbone | DecodeGraphs = backbone
        self.tiers: tuple[int, ...] = ()
        if DECODE_GRAPHS in backend.features:
            self._model = DecodeGraphs(backbone, backend, max_key_len=max_model_len)
            self._drafter = DraftGraphs(drafter, backend)
            rows = range(1, max_num_seqs * (1 + max_drafts) + 1)
            self.tiers = tuple(sorted({row_tier(count) for count in rows}))
        self._verify_drafts = backend.ops[spec.verify_drafts]
        self._max_num_seqs, self._max_drafts = max_num_seqs, max_drafts
        self._context_len = max(0, min(_CONTEXT_LEN, max_model_len - 1 - max_drafts))
        self._num_blocks = blocks_for(self._context_len + 1 + max_drafts, _BLOCK_SIZE)
        self._geometry = CacheGeometry.for_engine(
            backbone.config,
            block_size=_BLOCK_SIZE,
            num_blocks=self._num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_seqs * (1 + max_drafts),
            max_drafts=max_drafts,
            has_drafter=True,
        )
        self._caches = run_on(
            self._runtime.compute_stream, lambda: backbone.create_caches(self._geometry)
        )
        # Different tokens, so that rows go to different experts.
        self._generator = torch.Generator().manual_seed(0)

    def draft_us(self, num_requests: int) -> float:
        """Microseconds of one draft pass."""
        device = self._runtime.device
        numbers = torch.arange(num_requests, device=device)
        batch = DraftBatch(
            anchor_ids=self._tokens(num_requests),
            anchor_positions=torch.full_like(numbers, self._context_len),
            seq_slots=numbers,
            floors=torch.zeros_like(numbers),
            valid=torch.ones_like(numbers, dtype=torch.bool),
        )
        return self._timed(
            lambda: self._drafter.draft(batch, self._caches, num_drafts=self._max_drafts)
        )

    def verify_us(self, num_rows: int) -> float:
        """Microseconds of one target step with greedy verification and context injection."""
        num_requests = min(num_rows, self._max_num_seqs)
        batch, draft_ids = self._verification(num_rows, num_requests)
        params = self._greedy(num_rows)
        query_starts = torch.nn.functional.pad(batch.query_lens.cumsum(0), (1, 0))

        def work() -> None:
            logits, state, plan = self._model.step(batch, self._caches)
            verified = self._verify_drafts(
                logits, params, SampleWork.GREEDY, query_starts, draft_ids, None
            )
            # A graph's plan has the capacity of its tier.
            final = plan.batch.query_lens.new_zeros(plan.batch.query_lens.shape[0])
            final[:num_requests] = 1 + verified.num_accepted
            self._drafter.inject(state, plan, final, self._caches)

        return self._timed(work)

    def _verification(self, num_rows: int, num_requests: int) -> tuple[StepBatch, Tensor]:
        """A step whose rows are spread evenly over its requests, and the drafts that it holds."""
        device = self._runtime.device
        lens = [num_rows // num_requests + (r < num_rows % num_requests)
                for r in range(num_requests)]  # fmt: skip
        query_lens = torch.tensor(lens, device=device)
        blocks = torch.arange(self._num_blocks, device=device)
        history = self._tokens(num_requests * self._backbone.config.history_len)
        batch = StepBatch(
            kind=StepKind.DECODE,
            input_ids=self._tokens(num_rows),
            query_lens=query_lens,
            context_lens=torch.full_like(query_lens, self._context_len),
            seq_slots=torch.arange(num_requests, device=device),
            block_table=blocks.repeat(num_requests, 1),
            history=history.view(num_requests, -1),
            logits_rows=torch.arange(num_rows, device=device),
            # The bounds of the engine's steps, whatever the device admits.
            max_query_len=1 + self._max_drafts,
            max_key_len=self._context_len + 1 + self._max_drafts,
        )
        return batch, self._tokens(num_requests * self._max_drafts).view(num_requests, -1)

    def _greedy(self, num_rows: int) -> SampleParams:
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=self._runtime.device)
        off = zeros.float()
        return SampleParams(
            temperature=off, top_k=zeros, top_p=off + 1.0, min_p=off, seeds=zeros,
            sample_index=zeros, positions=zeros,
        )  # fmt: skip

    def _tokens(self, count: int) -> Tensor:
        ids = torch.randint(self._backbone.config.vocab_size, (count,), generator=self._generator)
        return ids.to(self._runtime.device)

    def _timed(self, work: Callable[[], object]) -> float:
        stream = self._runtime.compute_stream

        def run() -> None:
            work()

        begun = stream.record_event(timed=True)
        stream.enqueue(run)
        ended = stream.record_event(timed=True)
        ended.synchronize()
        return ended.time_us - begun.time_us
