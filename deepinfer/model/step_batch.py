"""The inputs of one forward: tensors of a capacity, counts on the device, bounds on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from deepinfer.device.ops.state import CompressPlan, RowLayout, WindowPlan
from deepinfer.device.runtime import StepKind


class Cut(NamedTuple):
    """Rows that a step drops on its way through the layers; bounds on the host.

    Attributes:
        layer: its cache writes are the last work of the dropped rows.
        num_rows: rows that go on, over all requests; 0 ends the step there, so ranks that run
            a step together need the same answer to whether it is 0.
        max_query_len: upper bound of a request's rows that go on.
    """

    layer: int
    num_rows: int
    max_query_len: int


@dataclass(frozen=True, slots=True)
class BatchReplay:
    """What a prefill step computes less of than all rows in all layers.

    A decode step needs none of it: its rows lie so far behind every start and floor that their
    windows are complete, because a prompt keeps at least a window.

    Attributes:
        limits: [2 + 2 * len(cuts), R] int64 absolute positions. Row 0: window floor until the
            first cut, row 1: first position whose compressed rows and index keys may be written;
            then for each cut the first position that goes on and the window floor of the layers
            after it.
        cuts: by ascending layer.
    """

    limits: Tensor
    cuts: tuple[Cut, ...]

    @property
    def floors(self) -> Tensor:
        return self.limits[0]

    @property
    def write_from(self) -> Tensor:
        return self.limits[1]

    def starts_after(self, cut: int) -> Tensor:
        """[R] first position that goes on after the cut of that number."""
        return self.limits[2 + 2 * cut]

    def floors_after(self, cut: int) -> Tensor:
        """[R] window floor of the layers after the cut of that number."""
        return self.limits[3 + 2 * cut]


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
        replay: rows that are dropped on the way and window rows that are not seen, or None.
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
    replay: BatchReplay | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the device derives from a batch before the first layer.

    Attributes:
        batch: the batch.
        rows: request, position and validity of each row.
        window: where window rows are written, read and moved.
        compress: per compression ratio, what is completed and who sees what.
        origin: [T] int64 rows of the whole step that these are; None: all of them.
        cuts: of the plan of a whole step, by ascending layer.
    """

    batch: StepBatch
    rows: RowLayout
    window: WindowPlan
    compress: dict[int, CompressPlan]
    origin: Tensor | None = None
    cuts: tuple[CutPlan, ...] = ()

    @property
    def num_rows(self) -> int:
        """Capacity T."""
        return self.batch.input_ids.shape[0]

    @property
    def final(self) -> StepPlan:
        """The plan of the rows that leave the last layer."""
        return self.cuts[-1].after if self.cuts else self

    def entering(self, layer: int) -> StepPlan:
        """The plan of the rows that enter a layer."""
        return next((cut.after for cut in reversed(self.cuts) if cut.layer < layer), self)

    def cut(self, layer: int) -> CutPlan | None:
        """The cut at a layer, if there is one."""
        return next((cut for cut in self.cuts if cut.layer == layer), None)


@dataclass(frozen=True, slots=True)
class CutPlan:
    """Rows that go on from a layer's remainder.

    Attributes:
        layer: the layer.
        kept: [T'] int64 rows of the entering plan; padding stands for row 0.
        remainder: plan of the layer's remainder, which reads the window as it was written.
        after: plan of the layers after it.
    """

    layer: int
    kept: Tensor
    remainder: StepPlan
    after: StepPlan
