"""The inputs of one forward: tensors of a capacity, counts on the device, bounds on the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.device.ops.state import CompressPlan, RowLayout, WindowPlan
from deepinfer.device.runtime import StepKind


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a step computes, per row and per request.

    T and R are capacities: rows from sum(query_lens) on and requests with query_len 0 are
    padding. All tensors are int64 on the device.

    Attributes:
        kind: prefill, decode or empty.
        input_ids: [T] valid token ids, padding too.
        query_lens: [R] rows of each request, R >= 1.
        context_lens: [R] positions computed before this step.
        seq_slots: [R] persistent slot of each request (window ring, pending rows, counts).
        block_table: [R, max_blocks] cache blocks; -1 unused.
        history: [R, max_ngram - 1] tokens before each request's first row; -1 none.
        logits_rows: [L] rows whose logits are wanted.
        max_query_len: upper bound of query_lens.
        max_key_len: upper bound of context_len + query_len.
    """

    kind: StepKind
    input_ids: Tensor
    query_lens: Tensor
    context_lens: Tensor
    seq_slots: Tensor
    block_table: Tensor
    history: Tensor
    logits_rows: Tensor
    max_query_len: int
    max_key_len: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the device derives from a batch before the first layer.

    Attributes:
        batch: the batch.
        rows: request, position and validity of each row.
        window: where window rows are written, read and moved.
        compress: per compression ratio, what is completed and who sees what.
    """

    batch: StepBatch
    rows: RowLayout
    window: WindowPlan
    compress: dict[int, CompressPlan]
