"""Compressor of a KV source: compressed rows and index keys of the entries a step completes."""

from __future__ import annotations

from torch import Tensor

from deepinfer.model.caches import ModelCaches
from deepinfer.model.config import V41Config
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.packing import Packer
from deepinfer.model.step_batch import StepPlan


class Compressor:
    """Writes the caches of one KV source layer; ratio 1 (every token) or 2 (pairs)."""

    def __init__(self, config: V41Config, layer: int, ops: ModelOps, weights: Packer) -> None:
        """Bind ops and pack weights; `weights` is at the layer's `attn.`."""
        self._ops = ops
        self._layer = layer
        self._ratio = config.ratio(layer)
        self._eps = config.rms_norm_eps
        names = ["compressor.wkv.weight"]
        if self._ratio > 1:
            names.append("compressor.wgate.weight")
        self._project = weights.linear(*names)
        self._norm = weights.vector("compressor.norm.weight")
        self._index_key = weights.linear("indexer.wk.weight")
        self._index_norm = weights.vector("indexer.k_norm.weight")

    def write(self, x: Tensor, plan: StepPlan, caches: ModelCaches, rope_table: Tensor) -> None:
        """Write the entries completed by rows x [T, D] into both caches of this source.

        Source: CSA2 compressor; RoPE position is the first token of the group.
        """
        ops, emitted = self._ops, plan.compress[self._ratio]
        if self._ratio == 1:
            rows = emitted.emit_rows.clamp_min(0)
            pooled = ops.linear(x.index_select(0, rows), self._project)
        else:
            pooled = ops.compress_pair(
                ops.linear_f32(x, self._project),
                emitted.previous_row,
                emitted.ring_read,
                emitted.ring_write,
                emitted.emit_rows,
                ring=caches.pending[self._layer],
                like=x,
            )
        latent = ops.rmsnorm(pooled, self._norm, self._eps)
        ops.rope_store(
            latent,
            emitted.positions,
            emitted.slots,
            rope_table,
            cache=caches.compressed[self._layer],
        )
        # The index key starts from the latent before its rotation.
        key = ops.rmsnorm(ops.linear(latent, self._index_key), self._index_norm, self._eps)
        ops.rope_store(
            key, emitted.positions, emitted.slots, rope_table, cache=caches.index[self._layer]
        )
