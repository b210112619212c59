"""The integers of a step on their way to the device: one pinned buffer, one copy.

A step has a dozen small tensors. Copied one by one they cost the host more than building them.
A step that is issued as it is gets device memory of its own; one that is replayed is laid out on
the host as its graph wants it, padding included, so that one copy fills all inputs of the graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.device.ops.state import NEWCOMER
from deepinfer.device.runtime import Runtime, StepKind
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.step_tiers import Tier
from deepinfer.model.step_batch import BatchReplay, StepBatch


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Tensors of `BuiltStep` on the device: views of one allocation.

    Attributes:
        batch: inputs of the model.
        remap, limits, result_rows, result_seqs, draft_budget, draft_floors: as built; padding
            requests are newcomers with limit 0 whose results go to the spare row of the ring.
        draft_slots: [R] int64 slot of each request's drafts: its own, of padding the spare one.
    """

    batch: StepBatch
    remap: Tensor
    limits: Tensor
    result_rows: Tensor
    result_seqs: Tensor
    draft_slots: Tensor
    draft_budget: Tensor
    draft_floors: Tensor

    def narrowed(self, num_seqs: int, num_rows: int) -> DeviceStep:
        """A decode step without its padding."""
        batch = replace(
            self.batch,
            input_ids=self.batch.input_ids[:num_rows],
            query_lens=self.batch.query_lens[:num_seqs],
            context_lens=self.batch.context_lens[:num_seqs],
            seq_slots=self.batch.seq_slots[:num_seqs],
            block_table=self.batch.block_table[:num_seqs],
            history=self.batch.history[:num_seqs],
            logits_rows=self.batch.logits_rows[:num_rows],
        )
        return DeviceStep(
            batch,
            remap=self.remap[:num_seqs],
            limits=self.limits[:num_seqs],
            result_rows=self.result_rows[:num_seqs],
            result_seqs=self.result_seqs[:num_seqs],
            draft_slots=self.draft_slots[:num_seqs],
            draft_budget=self.draft_budget,
            draft_floors=self.draft_floors[:num_seqs],
        )


class _Integers(NamedTuple):
    """All integers of a step, in the order in which they are packed; `replay` are its limits."""

    input_ids: Tensor
    query_lens: Tensor
    context_lens: Tensor
    seq_slots: Tensor
    block_table: Tensor
    history: Tensor
    logits_rows: Tensor
    replay: Tensor
    remap: Tensor
    limits: Tensor
    result_rows: Tensor
    result_seqs: Tensor
    draft_slots: Tensor
    draft_budget: Tensor
    draft_floors: Tensor

    @classmethod
    def of(cls, built: BuiltStep) -> _Integers:
        batch, replay = built.batch, built.batch.replay
        return cls(
            input_ids=batch.input_ids,
            query_lens=batch.query_lens,
            context_lens=batch.context_lens,
            seq_slots=batch.seq_slots,
            block_table=batch.block_table,
            history=batch.history,
            logits_rows=batch.logits_rows,
            replay=_NOTHING if replay is None else replay.limits,
            remap=built.remap,
            limits=built.limits,
            result_rows=built.result_rows,
            result_seqs=built.result_seqs,
            draft_slots=batch.seq_slots,
            draft_budget=built.draft_budget,
            draft_floors=built.draft_floors,
        )

    def views(self, packed: Tensor) -> _Integers:
        """Tensors of the same shapes in a packed one."""
        parts = packed.split([part.numel() for part in self])
        return _Integers(*(part.view(own.shape) for part, own in zip(parts, self, strict=True)))

    def step(
        self, kind: StepKind, max_query_len: int, max_key_len: int, replay: BatchReplay | None
    ) -> DeviceStep:
        """These tensors as a step with such host bounds."""
        batch = StepBatch(
            kind=kind,
            input_ids=self.input_ids,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            seq_slots=self.seq_slots,
            block_table=self.block_table,
            history=self.history,
            logits_rows=self.logits_rows,
            max_query_len=max_query_len,
            max_key_len=max_key_len,
            replay=None if replay is None else replace(replay, limits=self.replay),
        )
        return DeviceStep(
            batch,
            remap=self.remap,
            limits=self.limits,
            result_rows=self.result_rows,
            result_seqs=self.result_seqs,
            draft_slots=self.draft_slots,
            draft_budget=self.draft_budget,
            draft_floors=self.draft_floors,
        )


_NOTHING = torch.empty((0, 0), dtype=torch.int64)
_ALIGNMENT = 16
"""Integers that the parts of a tier's inputs are aligned to, 128 bytes: compilers of kernels look
at the alignment of what they are given, and would compile anew for every tier."""


_AS_PADDING = frozenset({"logits_rows", "replay", "result_seqs"})
"""Parts of a decode step that are the same in its padding: they count, or there are none."""
_OF_NEWCOMERS = frozenset({"input_ids", "history"})
"""Parts that are the same where every request has a result in flight."""


class StepUpload:
    """A built step in pinned memory; kept by whoever enqueues the copy until it was issued."""

    def __init__(self, built: BuiltStep, runtime: Runtime) -> None:
        """Pack a step as it is.

        Args:
            built: its host tensors; not needed any more afterwards.
            runtime: whose device it is for.
        """
        self._batch, self._parts = built.batch, _Integers.of(built)
        size = sum(part.numel() for part in self._parts)
        self._packed = runtime.pinned((size,), torch.int64)
        torch.cat([part.flatten() for part in self._parts], out=self._packed)

    def to(self, device: torch.device) -> DeviceStep:
        """Issue the copy; call it inside `Stream.enqueue`."""
        packed = self._packed.to(device, non_blocking=True)
        batch = self._batch
        return self._parts.views(packed).step(
            batch.kind, batch.max_query_len, batch.max_key_len, batch.replay
        )


class TierLayout:
    """How the integers of a tier's steps are packed, and what stands where a step has none.

    Attributes:
        padding: [n] int64 on the host, a step of padding requests only.
    """

    def __init__(
        self, tier: Tier, *, block_size: int, history_len: int, spare_result: int, spare_slot: int
    ) -> None:
        """Lay a tier out.

        Args:
            tier: its capacities.
            block_size: tokens of a cache block.
            history_len: tokens before a request that the model looks at.
            spare_result: row of the result ring that nobody reads.
            spare_slot: slot of drafts that nobody has.
        """
        seqs = torch.zeros(tier.num_seqs, dtype=torch.int64)
        rows = torch.arange(tier.num_rows)
        width = -(-tier.key_len // block_size)
        self._tier = tier
        parts = _Integers(
            input_ids=torch.zeros_like(rows),
            query_lens=seqs,
            context_lens=seqs,
            seq_slots=seqs,
            block_table=seqs.new_full((tier.num_seqs, width), -1),
            history=seqs.new_full((tier.num_seqs, history_len), -1),
            logits_rows=rows,
            replay=_NOTHING,
            remap=torch.full_like(seqs, NEWCOMER),
            limits=seqs,
            result_rows=torch.full_like(seqs, spare_result),
            result_seqs=torch.arange(tier.num_seqs),
            draft_slots=torch.full_like(seqs, spare_slot),
            draft_budget=seqs.new_zeros(int(tier.has_budget)),
            draft_floors=seqs,
        )
        self._places: list[tuple[int, int, torch.Size]] = []
        first = 0
        for part in parts:
            self._places.append((first, first + part.numel(), part.shape))
            first += -(-part.numel() // _ALIGNMENT) * _ALIGNMENT
        self.padding = torch.zeros(first, dtype=torch.int64)
        for part, place in zip(parts, self._views(self.padding), strict=True):
            place.copy_(part)

    def _views(self, packed: Tensor) -> _Integers:
        return _Integers(*(packed[first:end].view(shape) for first, end, shape in self._places))

    def step(self, packed: Tensor) -> DeviceStep:
        """The tier's inputs as views of a packed tensor on the device."""
        tier = self._tier
        return self._views(packed).step(StepKind.DECODE, tier.query_len, tier.key_len, None)

    def pack(self, built: BuiltStep, runtime: Runtime) -> Tensor:
        """A step of this tier in pinned memory, padded.

        Args:
            built: its host tensors; not needed any more afterwards.
            runtime: whose device it is for.
        """
        packed = runtime.pinned((self.padding.shape[0],), torch.int64)
        # Through numpy, because an assignment of a torch slice costs the host four times as much.
        target = packed.numpy()
        np.copyto(target, self.padding.numpy())
        same = _AS_PADDING if built.num_newcomers else _AS_PADDING | _OF_NEWCOMERS
        parts = zip(_Integers._fields, _Integers.of(built), self._places, strict=True)
        for name, part, (first, end, shape) in parts:
            if name in same:
                continue
            values = part.numpy()
            if len(shape) == 1:
                target[first : first + math.prod(part.shape)] = values
                continue
            # A request may own more blocks than the tier's keys need.
            num_rows, num_columns = part.shape[0], min(part.shape[1], shape[1])
            place = target[first:end].reshape(shape)
            place[:num_rows, :num_columns] = values[:, :num_columns]
        return packed
