"""Models that follow a script: each next token is a function of the tokens before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.ops.state import row_layout
from deepinfer.model.caches import CacheGeometry, ModelCaches
from deepinfer.model.config import V41Config
from deepinfer.model.step_batch import StepBatch

PREFERRED = 20.0
Script = Callable[[list[int]], int | Tensor]


class ScriptedModel:
    """Chooses each next token by a script of the tokens before it; keeps real caches unused."""

    def __init__(self, config: V41Config, backend: Backend, script: Script) -> None:
        self._config, self._backend, self._script = config, backend, script
        self._tokens: dict[int, list[int]] = {}

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches:
        return ModelCaches(self._config, geometry, self._backend)

    def forward(self, batch: StepBatch, caches: ModelCaches) -> Tensor:
        before: list[list[int]] = []
        first = 0
        for slot, context, length in zip(
            batch.seq_slots.tolist(),
            batch.context_lens.tolist(),
            batch.query_lens.tolist(),
            strict=True,
        ):
            known = self._tokens.setdefault(slot, [])
            known[context:] = batch.input_ids[first : first + length].tolist()
            assert len(known) == context + length, "the engine skipped a position"
            before += [known[: context + row + 1] for row in range(length)]
            first += length
        rows = [self._row(before[row]) for row in batch.logits_rows.tolist()]
        return torch.stack(rows) if rows else torch.zeros(0, self._config.vocab_size)

    def _row(self, known: list[int]) -> Tensor:
        wanted = self._script(known)
        if isinstance(wanted, Tensor):
            return wanted
        row = torch.zeros(self._config.vocab_size)
        row[wanted] = PREFERRED
        return row


class CheckingModel(ScriptedModel):
    """Keeps the tokens in the real caches and nowhere else.

    Position and token of every row are written to a compressed cache through the block table and
    to a window ring through the slot, and all earlier ones are read back and checked. Poison,
    another request's rows and positions that were never computed fail the step.
    """

    def forward(self, batch: StepBatch, caches: ModelCaches) -> Tensor:
        rows = self._backend.ops[row_layout](
            batch.query_lens, batch.context_lens, batch.input_ids.shape[0]
        )
        source = max(caches.compressed)  # the last KV source has one entry per token
        size, ring = caches.geometry.block_size, caches.geometry.ring
        known: list[list[int]] = [[] for _ in range(batch.query_lens.shape[0])]
        before: list[list[int]] = []
        for row, token in enumerate(batch.input_ids.tolist()):
            seq, position = int(rows.row_seq[row]), int(rows.positions[row])
            assert rows.valid[row]
            positions = torch.arange(position + 1)
            blocks = batch.block_table[seq, positions // size]
            assert blocks.min() >= 0, "a position has no block"
            slots = blocks * size + positions % size
            window = positions[-self._config.sliding_window :]
            in_ring = batch.seq_slots[seq] * ring + window % ring
            content = torch.zeros(1, caches.compressed[source].width)
            content[0, 0], content[0, 1] = position, token
            caches.compressed[source].pack(slots[-1:], content)
            caches.windows[0].pack(in_ring[-1:], content)
            read = caches.compressed[source].unpack(slots)
            assert torch.equal(read[:, 0], positions.float()), "wrong or poisoned block rows"
            assert torch.equal(caches.windows[0].unpack(in_ring), read[window]), "wrong ring rows"
            known[seq] = read[:, 1].int().tolist()
            before.append(known[seq])
        logits = [self._row(before[row]) for row in batch.logits_rows.tolist()]
        return torch.stack(logits) if logits else torch.zeros(0, self._config.vocab_size)
