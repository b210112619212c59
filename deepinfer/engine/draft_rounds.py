"""A round of speculation on the device: how much is verified, what is injected, what is drafted.

    results of step N -> drafts of the slots -> rows of step N+1 -> forward -> verification
         ^                                                                        |
         +------- block pass from the new anchors <- context of the final rows ---+

All of it is issued in stream order and none of it is read on the host: the next step's rows
follow from tensors. Nothing is undone when drafts are refused. Every cache is addressed by
position, so the refused rows are written over when their positions are fed again; context is
injected for final rows only.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.ops import spec
from deepinfer.device.ops.sampling import SampleWork
from deepinfer.device.ops.state import StepResults
from deepinfer.engine.sampler import StepDrafts
from deepinfer.engine.sampling_batch import SamplingBatch
from deepinfer.engine.slot_drafts import SlotDrafts
from deepinfer.engine.step_upload import DeviceStep
from deepinfer.model.caches import ModelCaches
from deepinfer.model.draft_batch import DraftBatch, Drafts
from deepinfer.model.forwarded import Forwarded
from deepinfer.model.layer_state import LayerState
from deepinfer.model.step_batch import StepPlan


class DraftModel(Protocol):
    """What rounds are run with: the drafter, or a scripted double of it in tests."""

    def inject(
        self, state: LayerState, plan: StepPlan, num_accepted: Tensor, caches: ModelCaches
    ) -> None: ...

    def draft(
        self, batch: DraftBatch, caches: ModelCaches, *, num_drafts: int | None = None
    ) -> Drafts: ...


class Anchors(NamedTuple):
    """Where the sampling requests of a step stand after it.

    Attributes:
        token_ids: [N] int64 newest token of each.
        positions: [N] int64 its position.
    """

    token_ids: Tensor
    positions: Tensor


class DraftRounds:
    """The drafter and the drafts of all slots."""

    def __init__(
        self,
        drafter: DraftModel,
        caches: ModelCaches,
        backend: Backend,
        *,
        max_drafts: int,
        vocab_size: int,
    ) -> None:
        """No drafts yet.

        Args:
            drafter: drafts and keeps its context in `caches`.
            caches: of the target and the drafter.
            backend: its op deals out a batch's budget.
            max_drafts: D drafts of a request, at least 1.
            vocab_size: V.
        Raises:
            CapabilityError: the backend lacks the op.
        """
        self._drafter, self._caches, self._max_drafts = drafter, caches, max_drafts
        self._admit_drafts = backend.ops[spec.admit_drafts]
        num_slots = caches.geometry.max_num_seqs
        self._slots = SlotDrafts(num_slots, max_drafts, vocab_size, backend.runtime.device)

    def allocate_logits(self) -> None:
        """Have memory for logits of drafts that are drawn at random, if there was none yet."""
        self._slots.allocate_logits()

    def draft_ids(self, slots: Tensor) -> Tensor:
        """[n, D] int64 drafts of slots [n]; -1 and what follows are none."""
        return self._slots.ids(slots)

    def survival(self, slots: Tensor) -> Tensor:
        """[n, D] fp32 probability that the drafts up to each are accepted."""
        return self._slots.survival(slots)

    def step_drafts(self, slots: Tensor, work: SampleWork) -> StepDrafts:
        """Drafts that a decode step verifies, before `advance` draws the next ones."""
        return StepDrafts(self._slots.ids(slots), self._slots.logits(slots, work))

    def query_bounds(self, step: DeviceStep, results: StepResults) -> Tensor:
        """[R] rows of each request of a decode step: the host's bounds, or what is admitted.

        Args:
            step: as the host built it.
            results: that it goes on from.
        """
        batch = step.batch
        if step.draft_budget.shape[0] == 0:
            return batch.query_lens
        reached = results.context_lens.index_select(0, step.remap.clamp_min(0))
        context_lens = torch.where(step.remap >= 0, reached, batch.context_lens)
        ids = self._slots.ids(step.draft_slots)
        available = torch.minimum((ids >= 0).long().cumprod(1).sum(1), batch.query_lens - 1)
        room = step.limits - context_lens - 1
        available = torch.minimum(available, room).clamp_min(0)
        survival = self._slots.survival(step.draft_slots)
        return 1 + self._admit_drafts(survival, available, step.draft_budget)

    def advance(
        self,
        step: DeviceStep,
        forwarded: Forwarded,
        num_final: Tensor,
        anchors: Anchors,
        controls: SamplingBatch | None,
    ) -> None:
        """Make a step's final rows context, and draft after the new anchors.

        Args:
            step: as it was run.
            forwarded: what its forward left.
            num_final: [R] int64 rows of each request whose tokens are final.
            anchors: of the requests that sample.
            controls: of the same requests, on the device; None: nobody can use drafts.
        """
        capacity = forwarded.plan.batch.query_lens.shape[0]
        padded = torch.nn.functional.pad(num_final, (0, capacity - num_final.shape[0]))
        self._drafter.inject(forwarded.state, forwarded.plan, padded, self._caches)
        # Also of prompts that go on: a slot's drafts of an earlier owner are nobody's.
        self._slots.forget(step.draft_slots)
        if controls is None or step.result_seqs.shape[0] == 0:
            return
        seqs = step.result_seqs
        # A draft is of use if the position after it may be computed.
        valid = anchors.positions + 1 < step.limits.index_select(0, seqs)
        params = None
        if controls.work is not SampleWork.GREEDY:
            owner = torch.arange(seqs.shape[0], device=seqs.device)
            params = controls.params(owner, anchors.positions)
        batch = DraftBatch(
            anchor_ids=anchors.token_ids.clamp_min(0),
            anchor_positions=anchors.positions,
            seq_slots=step.batch.seq_slots.index_select(0, seqs),
            floors=step.draft_floors.index_select(0, seqs),
            valid=valid,
            params=params,
        )
        drafts = self._drafter.draft(batch, self._caches, num_drafts=self._max_drafts)
        slots = step.draft_slots.index_select(0, seqs)
        self._slots.keep(slots, drafts, valid, controls.work)
