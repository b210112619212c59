"""From a step's logits to its tokens: controls, verification of drafts, counts, logprobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.ops import sampling, spec
from deepinfer.device.ops.sampling import Logprobs
from deepinfer.device.ops.spec import Verified
from deepinfer.engine.logit_rows import LogitRows
from deepinfer.engine.sampling_batch import SamplingBatch


class StepDrafts(NamedTuple):
    """Drafts that stand in a decode step, by sampling request.

    Attributes:
        ids: [N, D] int64; -1 and what follows are none.
        logits: [N, D, V] fp32 that they were drawn from, or None: they are certain.
    """

    ids: Tensor
    logits: Tensor | None


class Sampled(NamedTuple):
    """What a step decides, by sampling request.

    Attributes:
        verified: tokens [N, 1 + D] and accepted drafts [N].
        finite: [N, 1 + D] bool, whether the logits behind each token can be sampled from.
        logprobs: of the tokens, N * (1 + D) rows, or None where nobody wants them.
    """

    verified: Verified
    finite: Tensor
    logprobs: Logprobs | None


@dataclass(slots=True)
class _PenaltyState:
    """Token counts per slot, made when the first penalised request arrives."""

    output_counts: Tensor
    prompt_seen: Tensor


class Sampler:
    """Sampling ops of one rank and the token counts they need; all calls in stream order."""

    def __init__(
        self, backend: Backend, *, num_slots: int, vocab_size: int, max_drafts: int
    ) -> None:
        """Bind the ops.

        Args:
            backend: device layer.
            num_slots: persistent slots.
            vocab_size: V of the logits.
            max_drafts: D drafts of a request in a step.
        Raises:
            CapabilityError: the backend lacks an op of sampling, or of verification if D > 0.
        """
        ops, self._runtime = backend.ops, backend.runtime
        self._shape, self._max_drafts = (num_slots, vocab_size), max_drafts
        self._penalties: _PenaltyState | None = None
        self._apply_controls = ops[sampling.apply_controls]
        self._sample_tokens = ops[sampling.sample_tokens]
        self._token_logprobs = ops[sampling.token_logprobs]
        self._finite_rows = ops[sampling.finite_rows]
        self._count_tokens = ops[sampling.count_tokens]
        self._verify_drafts = ops[spec.verify_drafts] if max_drafts else None

    def start_penalties(self, slot: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        """Set the token counts of a slot to those of the sequence that just got it.

        Args:
            slot: persistent slot.
            prompt_ids: [n] int64 on any device.
            output_ids: [m] int64 on any device.
        """
        device = self._runtime.device
        if self._penalties is None:
            self._penalties = _PenaltyState(
                torch.zeros(self._shape, dtype=torch.int32, device=device),
                torch.zeros(self._shape, dtype=torch.bool, device=device),
            )
        counts, seen = self._penalties.output_counts, self._penalties.prompt_seen
        counts[slot] = 0
        seen[slot] = False
        seen[slot, prompt_ids.to(device)] = True
        ids = output_ids.to(device)
        self._count_tokens(ids, torch.full_like(ids, slot), counts)

    def score(self, logits: Tensor, targets: list[int], num_top: int) -> Logprobs:
        """Log probabilities of given tokens after rows of logits [n, V]."""
        ids = torch.tensor(targets, device=logits.device)
        return self._token_logprobs(logits, ids, num_top)

    def sample(
        self, logits: Tensor, rows: LogitRows, batch: SamplingBatch, drafts: StepDrafts | None
    ) -> Sampled:
        """Decide the tokens of a step.

        Args:
            logits: [L, V] fp32 of `rows`.
            rows: which request and position each row is for.
            batch: controls of the requests, on the device.
            drafts: what stands between the rows of a request; None: each request has one row.
        """
        pending = rows.owner.new_empty((rows.owner.shape[0], 0))
        if drafts is not None and batch.has_penalties:
            pending = rows.before(drafts.ids)
        counts = self._penalties
        seen = None if counts is None else (counts.output_counts, counts.prompt_seen)
        processed = self._apply_controls(logits, batch.controls(rows, pending, seen))
        verified = self._decide(processed, rows, batch, drafts)
        if batch.has_penalties and counts is not None:
            tokens = verified.token_ids
            slots = torch.where(tokens >= 0, batch.penalised_slots.unsqueeze(1), -1)
            self._count_tokens(tokens.flatten(), slots.flatten(), counts.output_counts)
        usable = self._finite_rows(logits) & self._finite_rows(processed)
        behind = self._rows_behind(rows)
        finite = usable.index_select(0, behind.flatten()).view(behind.shape)
        logprobs = None
        if batch.num_top is not None:
            raw = logits.index_select(0, behind.flatten())
            ids = verified.token_ids.flatten().clamp_min(0)
            logprobs = self._token_logprobs(raw, ids, batch.num_top)
        return Sampled(verified, finite, logprobs)

    def _decide(
        self, processed: Tensor, rows: LogitRows, batch: SamplingBatch, drafts: StepDrafts | None
    ) -> Verified:
        params = batch.params(rows.owner, rows.positions)
        if drafts is not None:
            assert self._verify_drafts is not None  # a step with drafts is for max_drafts > 0
            return self._verify_drafts(
                processed, params, batch.work, rows.starts, drafts.ids, drafts.logits
            )
        tokens = self._sample_tokens(processed, params, batch.work).unsqueeze(1)
        padded = torch.nn.functional.pad(tokens, (0, self._max_drafts), value=-1)
        return Verified(padded, torch.zeros_like(tokens[:, 0]))

    def _rows_behind(self, rows: LogitRows) -> Tensor:
        """[N, 1 + D] row that decides each token of a request; its last where there is none."""
        places = torch.arange(1 + self._max_drafts, device=rows.starts.device)
        last = (rows.starts[1:] - 1).unsqueeze(1)
        behind = torch.minimum(rows.starts[:-1].unsqueeze(1) + places, last)
        return behind.clamp_min(0)
