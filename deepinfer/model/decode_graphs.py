"""Decode steps as captured graphs, by capacity tier.

A decode step of a large model is hundreds of short launches; issuing them costs more than running
them. A graph issues them at once, but only with the shapes it was captured with. Steps are
therefore padded to tiers: requests to a power of two, the host bound of the key length likewise,
and the rows of a verification, whose number varies by request, to half steps between powers of
two. Padding requests have no rows and padding rows write nowhere, so a tier computes what the
exact step would.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from deepinfer.device.backend import Backend
from deepinfer.device.runtime import Graph, StepKind
from deepinfer.model.caches import CacheGeometry, ModelCaches
from deepinfer.model.forwarded import Forwarded
from deepinfer.model.step_batch import StepBatch

_log = logging.getLogger(__name__)
_MIN_KEY_LEN = 512
"""Smallest tier of the key length in tokens; below it all steps share a graph."""


class ForwardModel(Protocol):
    """What is captured: the backbone."""

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches: ...

    def step(self, batch: StepBatch, caches: ModelCaches) -> Forwarded: ...


@dataclass(frozen=True, slots=True)
class Tier:
    """Capacity of one graph.

    Attributes:
        num_seqs: requests.
        num_rows: rows of all requests.
        query_len: host bound of the rows of a request.
        key_len: host bound of context_len + query_len, in tokens.
    """

    num_seqs: int
    num_rows: int
    query_len: int
    key_len: int


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph with the tensors it reads and writes.

    Attributes:
        batch: its inputs, filled before each replay.
        found: one entry, of the newest run of the captured Python code: on a device that of the
            capture, which replays write into; on a CPU, whose replays run the code, the last.
        graph: the graph.
    """

    batch: StepBatch
    found: list[Forwarded]
    graph: Graph


def row_tier(num_rows: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that holds so many rows."""
    power = 1 << (num_rows - 1).bit_length()
    between = power // 4 * 3
    return between if num_rows <= between else power


def tier_of(batch: StepBatch, max_key_len: int) -> Tier:
    """Smallest tier that holds a decode step.

    Args:
        batch: the step.
        max_key_len: longest sequence; the last tier ends there.
    """
    num_seqs = 1 << (batch.query_lens.shape[0] - 1).bit_length()
    num_rows, query_len = batch.input_ids.shape[0], batch.max_query_len
    # Without drafts a request is a row, and more tiers would only be more graphs.
    num_rows = num_seqs if query_len == 1 else row_tier(num_rows)
    key_len = max(_MIN_KEY_LEN, 1 << (batch.max_key_len - 1).bit_length())
    return Tier(num_seqs, num_rows, query_len, min(key_len, max(max_key_len, batch.max_key_len)))


class DecodeGraphs:
    """A model whose decode steps are replayed; everything else is issued as it is."""

    def __init__(self, model: ForwardModel, backend: Backend, *, max_key_len: int) -> None:
        """Wrap a model.

        Args:
            model: the backbone on `backend`.
            backend: its runtime captures graphs.
            max_key_len: longest sequence in tokens.
        """
        self._model, self._runtime = model, backend.runtime
        self._max_key_len = max_key_len
        self._captured: dict[Tier, _Captured] = {}

    @property
    def num_graphs(self) -> int:
        """Tiers captured so far."""
        return len(self._captured)

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches:
        """Caches of the wrapped model; all steps must use the same ones."""
        return self._model.create_caches(geometry)

    def step(self, batch: StepBatch, caches: ModelCaches) -> Forwarded:
        """Logits [L, vocab] of a step on the device, and what a drafter's context is made of.

        Of a replayed step they are views that the next replay of the same tier overwrites: later
        work on the same stream may read them, nobody may keep them. State and plan have the
        capacity of the tier.
        """
        num_rows = batch.input_ids.shape[0]
        replayable = batch.kind is StepKind.DECODE and batch.replay is None
        if not replayable or batch.logits_rows.shape[0] > num_rows:
            return self._model.step(batch, caches)
        tier = tier_of(batch, self._max_key_len)
        captured = self._captured.get(tier)
        if captured is None:
            captured = self._captured[tier] = self._capture(tier, batch, caches)
        else:
            _fill(captured.batch, batch)
        captured.graph.replay()
        (found,) = captured.found
        return found._replace(logits=found.logits[: batch.logits_rows.shape[0]])

    def _capture(self, tier: Tier, batch: StepBatch, caches: ModelCaches) -> _Captured:
        held = _empty_batch(tier, batch, caches.geometry.block_size)
        _fill(held, batch)
        found: list[Forwarded] = []

        def work() -> None:
            found[:] = [self._model.step(held, caches)]

        # Warming up computes the step once more than needed; its writes are the same ones.
        graph = self._runtime.capture(work)
        _log.info(
            "decode graph for %d requests, %d rows, %d tokens", tier.num_seqs, tier.num_rows,
            tier.key_len,
        )  # fmt: skip
        return _Captured(held, found, graph)


def _empty_batch(tier: Tier, like: StepBatch, block_size: int) -> StepBatch:
    """A batch of the tier's shapes with padding requests only."""
    count = tier.num_seqs
    width = -(-tier.key_len // block_size)
    zeros = like.input_ids.new_zeros(count)
    rows = like.input_ids.new_zeros(tier.num_rows)
    return replace(
        like,
        input_ids=rows,
        query_lens=torch.zeros_like(zeros),
        context_lens=torch.zeros_like(zeros),
        seq_slots=torch.zeros_like(zeros),
        block_table=zeros.new_full((count, width), -1),
        history=zeros.new_full((count, like.history.shape[1]), -1),
        logits_rows=torch.zeros_like(rows),
        max_query_len=tier.query_len,
        max_key_len=tier.key_len,
    )


def _fill(held: StepBatch, batch: StepBatch) -> None:
    """Copy a step's inputs into a tier's tensors; the rest becomes padding."""
    num_seqs, columns = batch.query_lens.shape[0], batch.block_table.shape[1]
    held.query_lens[num_seqs:] = 0
    held.query_lens[:num_seqs].copy_(batch.query_lens)
    held.input_ids[: batch.input_ids.shape[0]].copy_(batch.input_ids)
    held.context_lens[:num_seqs].copy_(batch.context_lens)
    held.seq_slots[:num_seqs].copy_(batch.seq_slots)
    # A request may own more blocks than its tier's keys need.
    columns = min(columns, held.block_table.shape[1])
    held.block_table[:num_seqs, columns:] = -1
    held.block_table[:num_seqs, :columns].copy_(batch.block_table[:, :columns])
    held.history[:num_seqs].copy_(batch.history)
    held.logits_rows[: batch.logits_rows.shape[0]].copy_(batch.logits_rows)
