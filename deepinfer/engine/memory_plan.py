"""What the engine will take of the device's memory, said and checked before anything is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepinfer.device.backend import Backend, CacheKind
from deepinfer.device.errors import ConfigError
from deepinfer.model.caches import CacheGeometry, cache_block_bytes
from deepinfer.model.config import V41Config

_FP32_BYTES = 4
_GIB = 2**30
# Graphs take memory for good, and how many will be needed is not known: steps that are issued op
# by op, prompts above all, need the other half of what the caches leave.
_GRAPHS_PART = 2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose; `free` is what the device has before any of the others is taken.

    Attributes:
        used: taken already: weights, and whatever else runs on the device.
        free: free now.
        pool: compressed rows and index keys of all blocks.
        windows: window rings of all slots and layers, and the prefill workspace.
        pending: rows that wait for their partner in compressors of ratio 2.
        drafts: draft windows of all slots, and drafts with the logits they were drawn from.
        graphs: what graphs of decode steps may take while the engine runs; the last one captured
            may go beyond it, as its size is not known before.
        num_blocks: blocks of the pool.
        max_num_seqs: slots of the rings.
    """

    used: int
    free: int
    pool: int
    windows: int
    pending: int
    drafts: int
    graphs: int
    num_blocks: int
    max_num_seqs: int

    @classmethod
    def of(
        cls,
        config: V41Config,
        geometry: CacheGeometry,
        backend: Backend,
        *,
        max_drafts: int = 0,
        replays: bool = False,
    ) -> MemoryPlan:
        """The plan of caches of this geometry on a backend that holds the weights already.

        Args:
            config: the model.
            geometry: of its caches.
            backend: device layer.
            max_drafts: drafts of a sequence that are kept between steps.
            replays: whether decode steps are replayed as graphs.
        """
        facts = backend.runtime.memory()
        window_row = backend.cache_row_bytes(CacheKind.WINDOW, config.head_dim)
        rings = config.num_hidden_layers * geometry.max_num_seqs * geometry.ring
        rows = rings + geometry.workspace_rows(config.sliding_window)
        halves = sum(config.ratio(source) > 1 for source in config.kv_source_layer_ids)
        draft_rows = config.num_nextn_predict_layers * geometry.max_num_seqs * geometry.draft_ring
        kept_drafts = (geometry.max_num_seqs + 1) * max_drafts * config.vocab_size
        waiting = halves * geometry.max_num_seqs * geometry.pending_ring
        plan = cls(
            used=facts.total_bytes - facts.free_bytes,
            free=facts.free_bytes,
            pool=geometry.num_blocks * cache_block_bytes(config, geometry.block_size, backend),
            windows=rows * window_row,
            pending=waiting * 2 * config.head_dim * _FP32_BYTES,
            drafts=draft_rows * window_row + kept_drafts * _FP32_BYTES,
            graphs=0,
            num_blocks=geometry.num_blocks,
            max_num_seqs=geometry.max_num_seqs,
        )
        return replace(plan, graphs=max(0, plan.left) // _GRAPHS_PART) if replays else plan

    @property
    def left(self) -> int:
        """Free bytes that remain for activations; negative when the plan is too big."""
        return self.free - self.pool - self.windows - self.pending - self.drafts - self.graphs

    def require_room(self) -> None:
        """Refuse a plan that the device cannot hold.

        Raises:
            ConfigError: names the largest part and the setting that makes it smaller.
        """
        if self.left > 0:
            return
        remedy = (
            f"lower cache.memory or cache.num_blocks (now {self.num_blocks} blocks)"
            if self.pool >= self.windows
            else f"lower scheduler.max_num_seqs (now {self.max_num_seqs})"
        )
        raise ConfigError(f"the caches do not fit into the device's memory; {remedy}\n{self}")

    def __str__(self) -> str:
        rows = (
            ("in use already, weights included", self.used),
            (f"KV pool, {self.num_blocks} blocks", self.pool),
            (f"window rings, {self.max_num_seqs} sequences", self.windows),
            ("rows waiting in compressors", self.pending),
            ("drafts and their windows", self.drafts),
            ("graphs of decode steps, about", self.graphs),
            ("left for activations", self.left),
        )
        lines = [f"  {name:36} {size / _GIB:9.3f} GiB" for name, size in rows]
        return "\n".join(["memory budget", *lines])
