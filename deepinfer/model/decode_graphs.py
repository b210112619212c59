"""Decode steps as captured graphs, by capacity tier.

A decode step of a large model is hundreds of short launches; issuing them costs more than running
them. A graph issues them at once, but only with the shapes it was captured with. Steps are
therefore padded to tiers: requests to a power of two, the host bound of the key length likewise.
Padding requests have no rows and write nowhere, so a tier computes what the exact step would.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.runtime import Graph, StepKind
from deepinfer.model.caches import CacheGeometry, ModelCaches
from deepinfer.model.step_batch import StepBatch

_log = logging.getLogger(__name__)
_MIN_KEY_LEN = 512
"""Smallest tier of the key length in tokens; below it all steps share a graph."""


class ForwardModel(Protocol):
    """What is captured: the backbone."""

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches: ...

    def forward(self, batch: StepBatch, caches: ModelCaches) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Tier:
    """Capacity of one graph.

    Attributes:
        num_seqs: requests, and rows: a decode step has one row for each.
        key_len: host bound of context_len + query_len, in tokens.
    """

    num_seqs: int
    key_len: int


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph with the tensors it reads and writes.

    Attributes:
        batch: its inputs, filled before each replay.
        logits: one tensor, that of the newest run of the captured Python code: on a device the
            capture's, which replays write into; on a CPU, whose replays run the code, the last.
        graph: the graph.
    """

    batch: StepBatch
    logits: list[Tensor]
    graph: Graph


def tier_of(batch: StepBatch, max_key_len: int) -> Tier:
    """Smallest tier that holds a decode step with one row per request.

    Args:
        batch: the step.
        max_key_len: longest sequence; the last tier ends there.
    """
    num_seqs = 1 << (batch.query_lens.shape[0] - 1).bit_length()
    key_len = max(_MIN_KEY_LEN, 1 << (batch.max_key_len - 1).bit_length())
    return Tier(num_seqs, min(key_len, max(max_key_len, batch.max_key_len)))


class DecodeGraphs:
    """A model whose plain decode steps are replayed; everything else is issued as it is."""

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

    def forward(self, batch: StepBatch, caches: ModelCaches) -> Tensor:
        """Logits [L, vocab] of a step on the device.

        Of a replayed step they are a view that the next replay of the same tier overwrites:
        later work on the same stream may read them, nobody may keep them.
        """
        num_rows = batch.input_ids.shape[0]
        plain = batch.max_query_len == 1 and num_rows == batch.query_lens.shape[0]
        plain &= batch.replay is None
        num_logits = batch.logits_rows.shape[0]
        if batch.kind is not StepKind.DECODE or not plain or num_logits > num_rows:
            return self._model.forward(batch, caches)
        tier = tier_of(batch, self._max_key_len)
        captured = self._captured.get(tier)
        if captured is None:
            captured = self._captured[tier] = self._capture(tier, batch, caches)
        else:
            _fill(captured.batch, batch)
        captured.graph.replay()
        return captured.logits[0][:num_logits]

    def _capture(self, tier: Tier, batch: StepBatch, caches: ModelCaches) -> _Captured:
        held = _empty_batch(tier, batch, caches.geometry.block_size)
        _fill(held, batch)
        found: list[Tensor] = []

        def work() -> None:
            found[:] = [self._model.forward(held, caches)]

        # Warming up computes the step once more than needed; its writes are the same ones.
        graph = self._runtime.capture(work)
        _log.info("decode graph for %d requests, %d tokens", tier.num_seqs, tier.key_len)
        return _Captured(held, found, graph)


def _empty_batch(tier: Tier, like: StepBatch, block_size: int) -> StepBatch:
    """A batch of the tier's shapes with padding requests only."""
    count = tier.num_seqs
    width = -(-tier.key_len // block_size)
    zeros = like.input_ids.new_zeros(count)
    return replace(
        like,
        input_ids=zeros,
        query_lens=torch.zeros_like(zeros),
        context_lens=torch.zeros_like(zeros),
        seq_slots=torch.zeros_like(zeros),
        block_table=zeros.new_full((count, width), -1),
        history=zeros.new_full((count, like.history.shape[1]), -1),
        logits_rows=torch.zeros_like(zeros),
        max_query_len=1,
        max_key_len=tier.key_len,
    )


def _fill(held: StepBatch, batch: StepBatch) -> None:
    """Copy a step's inputs into a tier's tensors; the rest becomes padding."""
    num_seqs, columns = batch.query_lens.shape[0], batch.block_table.shape[1]
    held.query_lens[num_seqs:] = 0
    held.query_lens[:num_seqs].copy_(batch.query_lens)
    held.input_ids[:num_seqs].copy_(batch.input_ids)
    held.context_lens[:num_seqs].copy_(batch.context_lens)
    held.seq_slots[:num_seqs].copy_(batch.seq_slots)
    # A request may own more blocks than its tier's keys need.
    columns = min(columns, held.block_table.shape[1])
    held.block_table[:num_seqs, columns:] = -1
    held.block_table[:num_seqs, :columns].copy_(batch.block_table[:, :columns])
    held.history[:num_seqs].copy_(batch.history)
    held.logits_rows[: batch.logits_rows.shape[0]].copy_(batch.logits_rows)
