"""The KV state of the backbone: rings, workspace, compressed and index rows, pending rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.device.backend import Backend, CacheKind
from deepinfer.device.handles import RowCache
from deepinfer.model.config import V41Config


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes the engine chooses, in tokens, rows and requests.

    Attributes:
        block_size: tokens per cache block, even.
        num_blocks: blocks of the pool.
        max_num_seqs: persistent request slots.
        max_num_tokens: most rows of a step.
        ring: window ring rows per request: window + (steps in flight + 1) * (1 + drafts).
        pending_ring: rows kept of raw (value, gate) pairs per request and ratio-2 source.
        draft_ring: ring rows per request of each draft layer: window + draft block, whose rows
            are scratch; 0 when nothing is drafted.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_tokens: int
    ring: int
    pending_ring: int
    draft_ring: int = 0

    @classmethod
    def for_engine(
        cls,
        config: V41Config,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_tokens: int,
        async_depth: int = 0,
        max_drafts: int = 0,
        has_drafter: bool = False,
    ) -> CacheGeometry:
        """Geometry with the smallest rings that steps in flight and drafts allow.

        Steps in flight do not lengthen the draft ring: a block is computed and its context
        injected in the order of the compute stream, at positions that the device knows by then.
        """
        in_flight = (async_depth + 1) * (1 + max_drafts)
        pending = 2
        while pending < max_drafts + 2:
            pending *= 2
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            ring=config.sliding_window + in_flight,
            pending_ring=pending,
            draft_ring=config.sliding_window + config.dspark_block_size if has_drafter else 0,
        )

    def workspace_rows(self, window: int) -> int:
        """Rows of the prefill workspace: every request's history, then its chunk."""
        return self.max_num_tokens + self.max_num_seqs * (window - 1)


class ModelCaches:
    """All caches of one backbone on one backend.

    Attributes:
        geometry: sizes.
        window: tokens of the sliding window.
        windows: ring cache per layer.
        workspace: window rows of the prefill chunk in work, shared by the layers.
        compressed: per KV source.
        index: per KV source.
        pending: [slots, 2 * head_dim] fp32 per ratio-2 source.
        draft_windows: ring cache per draft layer; empty when nothing is drafted.
    """

    def __init__(self, config: V41Config, geometry: CacheGeometry, backend: Backend) -> None:
        self.geometry, self.window = geometry, config.sliding_window
        width = config.head_dim
        device = self._device = backend.runtime.device
        ring_rows = geometry.max_num_seqs * geometry.ring
        self.windows: list[RowCache] = [
            backend.create_cache(CacheKind.WINDOW, ring_rows, width)
            for _ in range(config.num_hidden_layers)
        ]
        self.workspace = backend.create_cache(
            CacheKind.WINDOW, geometry.workspace_rows(config.sliding_window), width
        )
        self.compressed: dict[int, RowCache] = {}
        self.index: dict[int, RowCache] = {}
        self.pending: dict[int, Tensor] = {}
        for source in config.kv_source_layer_ids:
            ratio = config.ratio(source)
            num_rows = geometry.num_blocks * (geometry.block_size // ratio)
            self.compressed[source] = backend.create_cache(CacheKind.COMPRESSED, num_rows, width)
            self.index[source] = backend.create_cache(
                CacheKind.INDEX, num_rows, config.index_head_dim
            )
            if ratio > 1:
                slots = geometry.max_num_seqs * geometry.pending_ring
                self.pending[source] = torch.zeros((slots, 2 * width), device=device)

        self.draft_windows: list[RowCache] = [
            backend.create_cache(
                CacheKind.WINDOW, geometry.max_num_seqs * geometry.draft_ring, width
            )
            for _ in range(config.num_nextn_predict_layers if geometry.draft_ring else 0)
        ]

    @property
    def block_record(self) -> str:
        """Layout of the bytes that `block_views` gives, the same on every machine."""
        num_blocks = self.geometry.num_blocks
        return "; ".join(
            f"source {source}: {cache.num_rows // num_blocks} rows of {cache.row_bytes} bytes "
            f"{cache.record}"
            for source, cache in self._grown()
        )

    @property
    def window_record(self) -> str:
        """Layout of the bytes that `window_views` gives, the same on every machine."""
        return "; ".join(
            f"{name} {layer}: {self.window} rows of {cache.row_bytes} bytes {cache.record}"
            for name, caches in (("layer", self.windows), ("draft layer", self.draft_windows))
            for layer, cache in enumerate(caches)
        )

    def block_views(self, block: int) -> list[Tensor]:
        """All bytes of a block: a flat uint8 view of each cache that grows with the text."""
        views: list[Tensor] = []
        for _, cache in self._grown():
            per_block = cache.num_rows // self.geometry.num_blocks
            views.append(cache.byte_view(block * per_block, per_block).view(-1))
        return views

    def _grown(self) -> list[tuple[int, RowCache]]:
        """Caches that grow with the text, by KV source."""
        return [
            (source, cache)
            for source in self.compressed
            for cache in (self.compressed[source], self.index[source])
        ]

    def window_views(self, slot: int, stop: int) -> list[Tensor]:
        """All bytes of a request's windows before position `stop`, at least a window.

        Flat uint8 views, layer by layer in the order of positions, whatever the ring's length:
        the rows that the layers read next, and nothing else. A compressor has no open pair at an
        even position, so at the end of a block there is no other state of a request.
        """
        views: list[Tensor] = []
        for caches, ring in (
            (self.windows, self.geometry.ring),
            (self.draft_windows, self.geometry.draft_ring),
        ):
            for cache in caches:
                views += [
                    cache.byte_view(slot * ring + first, num_rows).view(-1)
                    for first, num_rows in _ring_runs(stop - self.window, stop, ring)
                ]
        return views

    def poison_blocks(self, blocks: Tensor) -> None:
        """Overwrite the rows of released blocks [n] with NaN (test modes)."""
        for source in self.compressed:
            per_block = self.compressed[source].num_rows // self.geometry.num_blocks
            offsets = torch.arange(per_block, device=blocks.device)
            slots = (blocks.unsqueeze(1) * per_block + offsets).flatten()
            self.compressed[source].poison(slots)
            self.index[source].poison(slots)

    def poison_slot(self, slot: int) -> None:
        """Overwrite the rings of a released request slot with NaN (test modes)."""
        for caches, ring in (
            (self.windows, self.geometry.ring),
            (self.draft_windows, self.geometry.draft_ring),
        ):
            for cache in caches:
                cache.poison(torch.arange(slot * ring, (slot + 1) * ring, device=self._device))
        pending = self.geometry.pending_ring
        for rows in self.pending.values():
            rows[slot * pending : (slot + 1) * pending] = float("nan")


def _ring_runs(start: int, stop: int, ring: int) -> list[tuple[int, int]]:
    """(first row, rows) of positions start .. stop - 1, fewer than `ring`, in their order."""
    first, num_rows = start % ring, stop - start
    before_end = min(num_rows, ring - first)
    runs = [(first, before_end), (0, num_rows - before_end)]
    return [run for run in runs if run[1]]


def cache_block_bytes(config: V41Config, block_size: int, backend: Backend) -> int:
    """Bytes of one pool block over all KV sources, as the backend stores it."""
    total = 0
    for source in config.kv_source_layer_ids:
        row = backend.cache_row_bytes(CacheKind.COMPRESSED, config.head_dim)
        row += backend.cache_row_bytes(CacheKind.INDEX, config.index_head_dim)
        total += row * (block_size // config.ratio(source))
    return total
