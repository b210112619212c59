"""Draft passes as captured graphs, by requests.

A draft pass is small work in many launches: a few narrow layers and one short step for each place
in the block. Its rows are the same for every request, so a tier of requests is all that a graph
has to fit; padding requests are not valid and write nowhere. Context injection is issued as it is:
its rows are those of the step before, whatever their number.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.ops.sampling import SampleParams
from deepinfer.device.runtime import Graph
from deepinfer.model.caches import ModelCaches
from deepinfer.model.draft_batch import DraftBatch, Drafts
from deepinfer.model.layer_state import LayerState
from deepinfer.model.step_batch import StepPlan

_log = logging.getLogger(__name__)


class DraftModel(Protocol):
    """What drafts: the drafter, or a scripted double of it in tests."""

    def inject(
        self, state: LayerState, plan: StepPlan, num_accepted: Tensor, caches: ModelCaches
    ) -> None: ...

    def draft(
        self, batch: DraftBatch, caches: ModelCaches, *, num_drafts: int | None = None
    ) -> Drafts: ...


class _Tier(NamedTuple):
    """Requests to a power of two, drafts of each, and whether they are drawn at random."""

    num_seqs: int
    num_drafts: int | None
    draws: bool


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, the batch it reads, and the newest drafts; see `DecodeGraphs`."""

    batch: DraftBatch
    found: list[Drafts]
    graph: Graph


class DraftGraphs:
    """A drafter whose block passes are replayed."""

    def __init__(self, drafter: DraftModel, backend: Backend) -> None:
        """Wrap a drafter.

        Args:
            drafter: on `backend`, calibrated already.
            backend: its runtime captures graphs.
        """
        self._drafter, self._runtime = drafter, backend.runtime
        self._captured: dict[_Tier, _Captured] = {}

    @property
    def num_graphs(self) -> int:
        """Tiers captured so far."""
        return len(self._captured)

    def inject(
        self, state: LayerState, plan: StepPlan, num_accepted: Tensor, caches: ModelCaches
    ) -> None:
        """Inject as the wrapped drafter does."""
        self._drafter.inject(state, plan, num_accepted, caches)

    def draft(
        self, batch: DraftBatch, caches: ModelCaches, *, num_drafts: int | None = None
    ) -> Drafts:
        """Drafts as the wrapped drafter makes them; all passes must use the same caches.

        They are views that the next pass of the same tier overwrites: later work on the same
        stream may read them, nobody may keep them.
        """
        count = batch.anchor_ids.shape[0]
        tier = _Tier(1 << (count - 1).bit_length(), num_drafts, batch.params is not None)
        captured = self._captured.get(tier)
        if captured is None:
            captured = self._captured[tier] = self._capture(tier, batch, caches)
        else:
            _fill(captured.batch, batch)
        captured.graph.replay()
        (found,) = captured.found
        return Drafts(*(part[:count] for part in found))

    def _capture(self, tier: _Tier, batch: DraftBatch, caches: ModelCaches) -> _Captured:
        held = _empty_batch(tier.num_seqs, batch)
        _fill(held, batch)
        found: list[Drafts] = []

        def work() -> None:
            found[:] = [self._drafter.draft(held, caches, num_drafts=tier.num_drafts)]

        graph = self._runtime.capture(work)
        _log.info("draft graph for %d requests", tier.num_seqs)
        return _Captured(held, found, graph)


def _empty_batch(num_seqs: int, like: DraftBatch) -> DraftBatch:
    """A batch of padding requests."""

    def padding(column: Tensor) -> Tensor:
        return column.new_zeros(num_seqs)

    return DraftBatch(
        padding(like.anchor_ids),
        padding(like.anchor_positions),
        padding(like.seq_slots),
        padding(like.floors),
        padding(like.valid),
        None if like.params is None else SampleParams(*map(padding, like.params)),
    )


def _fill(held: DraftBatch, batch: DraftBatch) -> None:
    """Copy a pass's anchors into a tier's tensors; the rest becomes padding."""
    count = batch.anchor_ids.shape[0]
    held.valid[count:] = False
    pairs = [
        (held.anchor_ids, batch.anchor_ids),
        (held.anchor_positions, batch.anchor_positions),
        (held.seq_slots, batch.seq_slots),
        (held.floors, batch.floors),
        (held.valid, batch.valid),
    ]
    if held.params is not None and batch.params is not None:
        pairs += zip(held.params, batch.params, strict=True)
    for target, source in pairs:
        target[:count].copy_(source)
