"""Plans of a step: once for its rows, and once more for the rows that are left after each cut."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.ops.state import CompressPlan, RowLayout
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.step_batch import BatchReplay, Cut, CutPlan, StepBatch, StepPlan


class StepPlanner:
    """Derives on the device what every layer of a step needs."""

    def __init__(self, ops: ModelOps, *, ratios: list[int], window: int) -> None:
        """A planner.

        Args:
            ops: bound ops.
            ratios: compression ratios of the model's KV sources.
            window: W of its sliding windows.
        """
        self._ops, self._ratios, self._window = ops, ratios, window

    def plan(self, batch: StepBatch, geometry: CacheGeometry) -> StepPlan:
        """Plan of a step and of its cuts; reads nothing back."""
        replay = batch.replay
        if replay is None:
            return self._plan_rows(batch, torch.zeros_like(batch.context_lens), None, geometry)
        whole = self._plan_rows(batch, replay.floors, replay.write_from, geometry)
        cuts: list[CutPlan] = []
        for number, cut in enumerate(replay.cuts):
            entering = cuts[-1].after if cuts else whole
            cuts.append(self._cut(entering, cut, replay, number, geometry))
        return replace(whole, cuts=tuple(cuts))

    def _plan_rows(
        self, batch: StepBatch, floors: Tensor, write_from: Tensor | None, geometry: CacheGeometry
    ) -> StepPlan:
        ops = self._ops
        rows = ops.row_layout(batch.query_lens, batch.context_lens, batch.input_ids.shape[0])
        window = ops.window_plan(
            rows,
            batch.query_lens,
            batch.context_lens,
            batch.seq_slots,
            floors,
            kind=batch.kind,
            window=self._window,
            ring=geometry.ring,
        )
        compress: dict[int, CompressPlan] = {}
        for ratio in self._ratios:
            compress[ratio] = ops.compress_plan(
                rows,
                batch.query_lens,
                batch.seq_slots,
                batch.block_table,
                ratio=ratio,
                block_size=geometry.block_size,
                pending_ring=geometry.pending_ring,
            )
            if write_from is not None:
                compress[ratio] = _sparing_cached(compress[ratio], rows, write_from, ratio)
        return StepPlan(batch, rows, window, compress)

    def _cut(
        self,
        entering: StepPlan,
        cut: Cut,
        replay: BatchReplay,
        number: int,
        geometry: CacheGeometry,
    ) -> CutPlan:
        batch = entering.batch
        if cut.num_rows == 0 and batch.logits_rows.shape[0]:
            raise ContractError(
                f"the logits of {batch.logits_rows.shape[0]} rows are wanted and no row goes on "
                f"from layer {cut.layer}; let every row go on whose logits are wanted"
            )
        stops = batch.context_lens + batch.query_lens
        context_lens = torch.maximum(batch.context_lens, replay.starts_after(number))
        query_lens = (stops - context_lens).clamp_min(0)
        dropped = batch.query_lens - query_lens
        rows = self._ops.row_layout(query_lens, context_lens, cut.num_rows)
        entered = entering.rows.query_starts[:-1] + dropped
        kept = torch.where(rows.valid, entered[rows.row_seq] + rows.row_offset, 0)
        # A row whose logits are wanted goes on; anything else is a mistake of the caller's.
        wanted = batch.logits_rows
        owner = entering.rows.row_seq[wanted]
        logits_rows = wanted - entered[owner] + rows.query_starts[owner]
        after = self._plan_rows(
            replace(
                batch,
                input_ids=batch.input_ids.index_select(0, kept),
                query_lens=query_lens,
                context_lens=context_lens,
                logits_rows=logits_rows,
                max_query_len=cut.max_query_len,
                replay=None,
            ),
            replay.floors_after(number),
            replay.write_from,
            geometry,
        )
        origin = kept if entering.origin is None else entering.origin.index_select(0, kept)
        after = replace(after, origin=origin)
        read = entering.window.read.index_select(0, kept)
        read = torch.where(rows.valid.unsqueeze(1), read, -1)
        remainder = replace(after, window=entering.window._replace(read=read))
        return CutPlan(cut.layer, kept, remainder, after)


def _sparing_cached(
    plan: CompressPlan, rows: RowLayout, write_from: Tensor, ratio: int
) -> CompressPlan:
    """The plan without slots of entries whose last token is before `write_from` [R]."""
    if rows.positions.shape[0] == 0:
        return plan
    last = plan.entries * ratio + ratio - 1
    owner = rows.row_seq.index_select(0, plan.emit_rows.clamp_min(0))
    slots = torch.where(last >= write_from[owner], plan.slots, -1)
    return plan._replace(slots=slots)
