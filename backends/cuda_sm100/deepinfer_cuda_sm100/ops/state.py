"""State family on Triton kernels."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import state
from deepinfer.device.ops.state import (
    CompressPlan,
    NextInputs,
    RowLayout,
    StepInputs,
    StepResults,
    WindowPlan,
)
from deepinfer.device.runtime import StepKind
from deepinfer_kernels.state import correct_triton, plans_triton


def row_layout(query_lens: Tensor, context_lens: Tensor, num_rows: int) -> RowLayout:
    return RowLayout(*plans_triton.row_layout(query_lens, context_lens, num_rows))


def window_plan(
    rows: RowLayout,
    query_lens: Tensor,
    context_lens: Tensor,
    seq_slots: Tensor,
    floors: Tensor,
    *,
    kind: StepKind,
    window: int,
    ring: int,
) -> WindowPlan:
    return WindowPlan(
        *plans_triton.window_plan(
            plans_triton.Rows(*rows),
            query_lens,
            context_lens,
            seq_slots,
            floors,
            prefills=kind is StepKind.PREFILL,
            window=window,
            ring=ring,
        )
    )


def compress_plan(
    rows: RowLayout,
    query_lens: Tensor,
    seq_slots: Tensor,
    block_table: Tensor,
    *,
    ratio: int,
    block_size: int,
    pending_ring: int,
) -> CompressPlan:
    return CompressPlan(
        *plans_triton.compress_plan(
            plans_triton.Rows(*rows),
            query_lens,
            seq_slots,
            block_table,
            ratio=ratio,
            block_size=block_size,
            pending_ring=pending_ring,
        )
    )


def correct_inputs(
    host: StepInputs, draft_ids: Tensor, limits: Tensor, remap: Tensor, results: StepResults
) -> StepInputs:
    return StepInputs(
        *correct_triton.correct_inputs(
            correct_triton.Inputs(*host),
            draft_ids,
            limits,
            remap,
            correct_triton.Results(*results),
        )
    )


def next_inputs(
    inputs: StepInputs, seqs: Tensor, num_accepted: Tensor, *, kind: StepKind
) -> NextInputs:
    return NextInputs(
        *correct_triton.next_inputs(
            correct_triton.Inputs(*inputs), seqs, num_accepted, decodes=kind is StepKind.DECODE
        )
    )


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(state.correct_inputs, reason=reason)(correct_inputs)
    table.implements(state.next_inputs, reason=reason)(next_inputs)
    table.implements(state.row_layout, reason=reason)(row_layout)
    table.implements(state.window_plan, reason=reason)(window_plan)
    table.implements(state.compress_plan, reason=reason)(compress_plan)
