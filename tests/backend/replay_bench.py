"""Several requests on one backbone with rows of their own choosing; what they leave in the caches.

Requests share no slot. Blocks belong to prompts, so two requests with one prompt share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.handles import RowCache
from deepinfer.device.runtime import StepKind
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.loading import LoadedModel
from deepinfer.model.replay import PrefillRows, batch_replay
from deepinfer.model.step_batch import StepBatch

BLOCK_SIZE = 8


@dataclass(slots=True)
class Asked:
    """One request: its tokens so far, its slot and blocks, how far it is."""

    ids: list[int]
    slot: int
    table: int
    rows: PrefillRows = field(default_factory=PrefillRows)
    done: int = 0

    def __post_init__(self) -> None:
        self.done = self.rows.first


class ReplayBench:
    """Caches of a model and the steps on them."""

    def __init__(
        self, loaded: LoadedModel, backend: Backend, *, num_slots: int, num_tables: int, length: int
    ) -> None:
        """Poisoned caches.

        Args:
            loaded: the model on `backend`.
            backend: where it runs.
            num_slots: requests.
            num_tables: prompts.
            length: most tokens of one.
        """
        self.loaded, self.backend = loaded, backend
        self.device = backend.runtime.device
        width = -(-length // BLOCK_SIZE)
        self.tables = (
            torch.arange(num_tables * width).flip(0).view(width, num_tables).T.contiguous()
        )
        geometry = CacheGeometry.for_engine(
            loaded.config,
            block_size=BLOCK_SIZE,
            num_blocks=num_tables * width,
            max_num_seqs=num_slots,
            max_num_tokens=num_slots * length,
        )
        self.caches = loaded.backbone.create_caches(geometry)
        for slot in range(num_slots):
            self.caches.poison_slot(slot)
        self.caches.poison_blocks(torch.arange(num_tables * width, device=self.device))

    def step(
        self, kind: StepKind, asked: Sequence[Asked], lens: Sequence[int], wanted: Sequence[int]
    ) -> Tensor:
        """Logits of each request's last `wanted` rows of the next `lens`."""
        device, width = self.device, self.loaded.config.history_len
        contexts = [entry.done for entry in asked]
        parts = [
            entry.ids[entry.done :][:length] for entry, length in zip(asked, lens, strict=True)
        ]
        history = [([-1] * width + entry.ids[: entry.done])[-width:] for entry in asked]
        stops = torch.tensor(lens).cumsum(0).tolist()
        replay = None
        if kind is StepKind.PREFILL:
            replay = batch_replay([entry.rows for entry in asked], contexts, lens)
        if replay is not None:
            replay = replace(replay, limits=replay.limits.to(device))
        batch = StepBatch(
            kind=kind,
            input_ids=torch.tensor([i for part in parts for i in part], device=device),
            query_lens=torch.tensor(lens, device=device),
            context_lens=torch.tensor(contexts, device=device),
            seq_slots=torch.tensor([entry.slot for entry in asked], device=device),
            block_table=self.tables[[entry.table for entry in asked]].to(device),
            history=torch.tensor(history, device=device),
            logits_rows=torch.tensor(
                [
                    row
                    for stop, n in zip(stops, wanted, strict=True)
                    for row in range(stop - n, stop)
                ],
                dtype=torch.int64,
                device=device,
            ),
            max_query_len=max(lens),
            max_key_len=max(n + context for n, context in zip(lens, contexts, strict=True)),
            replay=replay,
        )
        found: list[Tensor] = []
        stream = self.backend.runtime.compute_stream
        stream.enqueue(lambda: found.append(self.loaded.backbone.forward(batch, self.caches)))
        stream.synchronize()
        for entry, length in zip(asked, lens, strict=True):
            entry.done += length
        return found[0].cpu()

    def prefill(self, *asked: Asked, chunk: int | None = None) -> list[Tensor]:
        """Run all to the end of their tokens, together; logits [vocab] of each one's last row."""
        logits: dict[int, Tensor] = {}
        while active := [entry for entry in asked if entry.done < len(entry.ids)]:
            left = [len(entry.ids) - entry.done for entry in active]
            lens = [min(n, chunk or n) for n in left]
            ends = [int(length == n) for length, n in zip(lens, left, strict=True)]
            rows = iter(self.step(StepKind.PREFILL, active, lens, ends))
            logits |= {e.slot: next(rows) for e, end in zip(active, ends, strict=True) if end}
        return [logits[entry.slot] for entry in asked]

    def decode(self, first: Sequence[Tensor], *asked: Asked, count: int) -> list[Tensor]:
        """`count` rows [count, vocab] of greedy logits for each; the first are given."""
        found = [[row] for row in first]
        for _ in range(count - 1):
            for entry, rows in zip(asked, found, strict=True):
                entry.ids.append(int(rows[-1].argmax()))
            step = self.step(StepKind.DECODE, asked, [1] * len(asked), [1] * len(asked))
            for rows, row in zip(found, step, strict=True):
                rows.append(row)
        return [torch.stack(rows) for rows in found]

    def window(self, asked: Asked, layer: int, first: int, stop: int) -> Tensor:
        """Canonical window rows [stop - first, width] of positions of a request."""
        ring = self.caches.geometry.ring
        slots = asked.slot * ring + torch.arange(first, stop, device=self.device) % ring
        return self.caches.windows[layer].unpack(slots).cpu()

    def blocks(self, table: int, num_tokens: int) -> dict[str, Tensor]:
        """Canonical compressed and index rows of a prompt's first tokens, by cache and source."""
        return {
            name: cache.unpack(self._entries(table, source, 0, num_tokens)).cpu()
            for name, source, cache in self._sources()
        }

    def poison_entries(self, table: int, first: int) -> None:
        """Overwrite every entry of a prompt whose last token is at `first` or later with NaN."""
        for _, source, cache in self._sources():
            cache.poison(self._entries(table, source, first, self.tables.shape[1] * BLOCK_SIZE))

    def _sources(self) -> Iterator[tuple[str, int, RowCache]]:
        for name, caches in (("compressed", self.caches.compressed), ("index", self.caches.index)):
            for source, cache in caches.items():
                yield f"{name}.{source}", source, cache

    def _entries(self, table: int, source: int, first: int, stop: int) -> Tensor:
        """Cache rows of a source's entries that end at tokens first .. stop - 1."""
        ratio = self.loaded.config.ratio(source)
        per_block = BLOCK_SIZE // ratio
        entry = torch.arange(first // ratio, stop // ratio)
        slots = self.tables[table][entry // per_block] * per_block + entry % per_block
        return slots.to(self.device)
