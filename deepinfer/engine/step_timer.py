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
from deepinfer.engine.step_tiers import row_tier, seq_tier
from deepinfer.model.backbone import Backbone
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.draft_batch import DraftBatch
from deepinfer.model.drafter import Drafter
from deepinfer.model.step_batch import StepBatch

_BLOCK_SIZE = 64
_CONTEXT_LEN = 512
"""Tokens before each dummy request; a step's time depends little on it, its rows matter."""


class ModelStepTimer:
    """Runs dummy steps of a model and its drafter in caches of its own, one after another.

    Where the engine replays steps as graphs, so does it, with the capacities of their tiers.

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
        self._runtime, self._backbone, self._drafter = backend.runtime, backbone, drafter
        self._replays = DECODE_GRAPHS in backend.features
        self._passes: dict[tuple[str, int], Callable[[], None]] = {}
        self.tiers: tuple[int, ...] = ()
        if self._replays:
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
        return self._timed("draft", num_requests, self._draft_pass)

    def verify_us(self, num_rows: int) -> float:
        """Microseconds of one target step with greedy verification and context injection."""
        return self._timed("verify", num_rows, self._verify_pass)

    def _draft_pass(self, num_requests: int) -> Callable[[], None]:
        numbers = torch.arange(self._num_seqs(num_requests), device=self._runtime.device)
        batch = DraftBatch(
            anchor_ids=self._tokens(numbers.shape[0]),
            anchor_positions=torch.full_like(numbers, self._context_len),
            seq_slots=numbers.clamp_max(num_requests - 1),
            floors=torch.zeros_like(numbers),
            valid=numbers < num_requests,
        )

        def work() -> None:
            self._drafter.draft(batch, self._caches, num_drafts=self._max_drafts)

        return work

    def _verify_pass(self, num_rows: int) -> Callable[[], None]:
        batch, draft_ids = self._verification(num_rows)
        params = self._greedy(batch.input_ids.shape[0])
        query_starts = torch.nn.functional.pad(batch.query_lens.cumsum(0), (1, 0))

        def work() -> None:
            logits, state, plan = self._backbone.step(batch, self._caches)
            verified = self._verify_drafts(
                logits, params, SampleWork.GREEDY, query_starts, draft_ids, None
            )
            final = torch.minimum(batch.query_lens, 1 + verified.num_accepted)
            self._drafter.inject(state, plan, final, self._caches)

        return work

    def _num_seqs(self, num_requests: int) -> int:
        """Requests that a pass has, padding included."""
        return seq_tier(num_requests) if self._replays else num_requests

    def _verification(self, num_rows: int) -> tuple[StepBatch, Tensor]:
        """A step whose rows are spread evenly over its requests, and the drafts that it holds."""
        device, used = self._runtime.device, min(num_rows, self._max_num_seqs)
        num_requests = self._num_seqs(used)
        capacity = max(num_requests, row_tier(num_rows)) if self._replays else num_rows
        lens = [num_rows // used + (r < num_rows % used) for r in range(used)]
        query_lens = torch.tensor(lens + [0] * (num_requests - used), device=device)
        blocks = torch.arange(self._num_blocks, device=device)
        history = self._tokens(num_requests * self._backbone.config.history_len)
        batch = StepBatch(
            kind=StepKind.DECODE,
            input_ids=self._tokens(capacity),
            query_lens=query_lens,
            context_lens=torch.full_like(query_lens, self._context_len),
            seq_slots=torch.arange(num_requests, device=device).clamp_max(used - 1),
            block_table=blocks.repeat(num_requests, 1),
            history=history.view(num_requests, -1),
            logits_rows=torch.arange(capacity, device=device),
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

    def _timed(self, what: str, count: int, make: Callable[[int], Callable[[], None]]) -> float:
        stream = self._runtime.compute_stream
        if (what, count) not in self._passes:
            work = run_on(stream, lambda: make(count))
            self._passes[what, count] = (
                self._runtime.capture(work).replay if self._replays else work
            )
        begun = stream.record_event(timed=True)
        stream.enqueue(self._passes[what, count])
        ended = stream.record_event(timed=True)
        ended.synchronize()
        return ended.time_us - begun.time_us
