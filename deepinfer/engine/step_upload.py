"""The integers of a step on their way to the device: one pinned buffer, one copy.

A step has a dozen small tensors. Copied one by one they cost the host more than building them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.device.runtime import Runtime
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.model.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Tensors of `BuiltStep` on the device: views of one allocation."""

    batch: StepBatch
    remap: Tensor
    limits: Tensor
    result_rows: Tensor
    result_seqs: Tensor
    draft_budget: Tensor
    draft_floors: Tensor


class StepUpload:
    """A built step in pinned memory; kept by whoever enqueues the copy until it was issued."""

    def __init__(self, built: BuiltStep, runtime: Runtime) -> None:
        """Pack a step.

        Args:
            built: its host tensors; not needed any more afterwards.
            runtime: whose device it is for.
        """
        batch, replay = built.batch, built.batch.replay
        self._batch = batch
        self._parts = (
            batch.input_ids,
            batch.query_lens,
            batch.context_lens,
            batch.seq_slots,
            batch.block_table,
            batch.history,
            batch.logits_rows,
            torch.empty((0, 0), dtype=torch.int64) if replay is None else replay.limits,
            built.remap,
            built.limits,
            built.result_rows,
            built.result_seqs,
            built.draft_budget,
            built.draft_floors,
        )
        self._packed = runtime.pinned((sum(part.numel() for part in self._parts),), torch.int64)
        torch.cat([part.flatten() for part in self._parts], out=self._packed)

    def to(self, device: torch.device) -> DeviceStep:
        """Issue the copy; call it inside `Stream.enqueue`."""
        packed = self._packed.to(device, non_blocking=True)
        views = packed.split([part.numel() for part in self._parts])
        shaped = [view.view(part.shape) for view, part in zip(views, self._parts, strict=True)]
        ids, query_lens, context_lens, slots, table, history, logits_rows, limits, *others = shaped
        replay = self._batch.replay
        batch = replace(
            self._batch,
            input_ids=ids,
            query_lens=query_lens,
            context_lens=context_lens,
            seq_slots=slots,
            block_table=table,
            history=history,
            logits_rows=logits_rows,
            replay=None if replay is None else replace(replay, limits=limits),
        )
        return DeviceStep(batch, *others)
