"""Context of the drafter: one feature per accepted position, and a KV row of it per stage."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.model.caches import ModelCaches
from deepinfer.model.config import V41Config
from deepinfer.model.draft_ops import DraftOps
from deepinfer.model.layer_state import LayerState
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.packing import Packer
from deepinfer.model.step_batch import StepPlan
from deepinfer.model.tracing import TraceSink


class DraftContext:
    """Injects accepted rows of a target step into the draft windows; stages never see target KV."""

    def __init__(
        self,
        config: V41Config,
        ops: ModelOps,
        draft_ops: DraftOps,
        *,
        weights: Packer,
        rope_table: Tensor,
    ) -> None:
        """Bind ops and pack weights; `weights` is at `mtp.`."""
        self._config, self._ops, self._draft_ops = config, ops, draft_ops
        self._rope_table = rope_table
        stages = range(config.num_nextn_predict_layers)
        self._project = weights.linear("0.main_proj.weight")
        self._norm = weights.vector("0.main_norm.weight")
        # All stages read the same feature, so their projections are one product.
        self._kv = weights.linear(*(f"{stage}.attn.wkv.weight" for stage in stages))
        self._kv_norms = [weights.vector(f"{stage}.attn.kv_norm.weight") for stage in stages]

    def inject(
        self,
        state: LayerState,
        plan: StepPlan,
        num_accepted: Tensor,
        caches: ModelCaches,
        trace: TraceSink | None = None,
    ) -> None:
        """Write the draft window rows of accepted positions; changes `caches` in place.

        Args:
            state: after the last layer of the step, with its taps.
            plan: the step.
            num_accepted: [R] int64 rows of each request that are final, from its first row on.
            caches: draft windows.
            trace: receives the context features, or None.

        Source: context KV injection of DSpark; rows are rotated and quantised as window rows.
        """
        ops, config, final = self._ops, self._config, plan.final
        if final.origin is not None:
            if final.num_rows == 0:
                return
            # Rows that were dropped on the way were each request's first ones.
            num_accepted = num_accepted - plan.batch.query_lens + final.batch.query_lens
        slots = self._draft_ops.draft_context(
            final.rows, num_accepted, plan.batch.seq_slots, ring=caches.geometry.draft_ring
        )
        feature = ops.linear(torch.cat(state.taps, dim=1), self._project)
        feature = ops.rmsnorm(feature, self._norm, config.rms_norm_eps)
        if trace is not None:
            trace.record("draft.context", feature)
        projected = ops.linear(feature, self._kv).split(config.head_dim, dim=1)
        for kv, norm, cache in zip(projected, self._kv_norms, caches.draft_windows, strict=True):
            row = ops.rmsnorm(kv, norm, config.rms_norm_eps)
            ops.rope_store(row, final.rows.positions, slots, self._rope_table, cache=cache)
