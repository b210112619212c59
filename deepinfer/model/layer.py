"""One backbone layer: Engram, attention and MoE sublayers, each inside mHC."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.handles import FetchHandle
from deepinfer.device.ops.mhc import MhcMix
from deepinfer.model.attention import Attention
from deepinfer.model.caches import ModelCaches
from deepinfer.model.config import V41Config
from deepinfer.model.control_selection import control_select
from deepinfer.model.controls import Selections
from deepinfer.model.engram import Engram
from deepinfer.model.layer_state import LayerState
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.moe import MoE
from deepinfer.model.packing import Packer
from deepinfer.model.step_batch import CutPlan, StepPlan
from deepinfer.model.tracing import TraceSink


class Layer:
    """A block; `write_kv` and `finish` are the two halves that the model's cut needs."""

    def __init__(
        self,
        config: V41Config,
        layer: int,
        *,
        backend: Backend,
        ops: ModelOps,
        weights: Packer,
        rope_table: Tensor,
        selections: Selections,
    ) -> None:
        """Bind ops and pack weights; `weights` is at `layers.N.`."""
        self.index = layer
        self._config, self._ops = config, ops
        self.engram = (
            Engram(config, ops, weights.under("engram."), backend)
            if layer in config.engram_layer_ids
            else None
        )
        self._attn_mhc, self._ffn_mhc = weights.mhc("attn"), weights.mhc("ffn")
        self._attn_norm = weights.vector("attn_norm.weight")
        self._ffn_norm = weights.vector("ffn_norm.weight")
        self.attention = Attention(
            config,
            layer,
            ops,
            weights.under("attn."),
            rope_table=rope_table,
            index_select=ops.index_select
            if selections is Selections.MODEL
            else control_select(backend.ops, selections, layer),
        )
        self.moe = MoE(
            config,
            ops,
            weights.under("ffn."),
            backend.runtime.device,
            num_experts=config.n_routed_experts,
            num_experts_per_tok=config.num_experts_per_tok,
        )

    def enter(self, state: LayerState, fetch: FetchHandle | None) -> LayerState:
        """State after this layer's Engram, if it has one."""
        if self.engram is None or fetch is None:
            return state
        streams = self.engram.inject(state.streams, fetch)
        return replace(state, streams=streams)

    def attention_input(self, state: LayerState) -> Tensor:
        """[T, D]: streams collapsed with the PREVIOUS sublayer's pre, normed."""
        return self._ops.mhc_collapse_norm(
            state.streams, state.pre, self._attn_norm, self._config.rms_norm_eps
        )

    def write_kv(self, x: Tensor, plan: StepPlan, caches: ModelCaches) -> Tensor | None:
        """Write every cache of this layer for rows x [T, D]; see `Attention.write_caches`."""
        return self.attention.write_caches(x, plan, caches)

    def finish(
        self,
        x: Tensor,
        low_rank: Tensor | None,
        state: LayerState,
        plan: StepPlan,
        caches: ModelCaches,
        *,
        cut: CutPlan | None,
        trace: TraceSink | None,
    ) -> LayerState:
        """Everything after the cache writes, for all rows or those that a cut keeps.

        Args:
            x: [T, D] from `attention_input` of the same state.
            low_rank: what `write_kv` returned.
            state: state after `enter`.
            plan: the step.
            caches: window of this layer and compressed rows of its source, read.
            cut: which rows go on, or None for all.
            trace: receives the decisions, or None.

        Returns:
            State of the rows that went on.
        """
        config, ops = self._config, self._ops
        if cut is not None:
            plan, state, x = cut.remainder, state.gather(cut.kept), x.index_select(0, cut.kept)
            if plan.num_rows == 0:
                return state
            low_rank = None if low_rank is None else low_rank.index_select(0, cut.kept)
        mix: MhcMix = ops.mhc_mix(
            state.streams,
            self._attn_mhc,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            num_iters=config.hc_sinkhorn_iters,
        )
        attended = self.attention.attend(x, low_rank, state, plan, caches)
        boundary = ops.mhc_boundary(
            attended.y,
            state.streams,
            mix,
            self._ffn_mhc,
            self._ffn_norm,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            num_iters=config.hc_sinkhorn_iters,
        )
        y, routing = self.moe.forward(boundary.x, plan.rows.valid)
        streams = ops.mhc_expand(y, boundary.streams, boundary.mix.post, boundary.mix.comb)
        if trace is not None:
            name = f"layers.{self.index}"
            trace.record(f"{name}.expert_ids", routing.ids)
            trace.record(f"{name}.expert_weights", routing.weights)
            if config.runs_index(self.index) and attended.entries is not None:
                trace.record(f"{name}.selected_positions", attended.entries)
            if self.index == config.candidate_source_layer_id and attended.candidates is not None:
                trace.record(f"{name}.candidate_blocks", attended.candidates)
        return replace(
            state,
            streams=streams,
            pre=boundary.mix.pre,
            entries=attended.entries,
            slots=attended.slots,
            candidates=attended.candidates,
        )

    def forward(
        self,
        state: LayerState,
        fetch: FetchHandle | None,
        plan: StepPlan,
        caches: ModelCaches,
        *,
        cut: CutPlan | None = None,
        trace: TraceSink | None = None,
    ) -> LayerState:
        """The whole layer for all rows of `plan`; callable alone with any recorded state."""
        if trace is not None:
            trace.record(f"layers.{self.index}.streams", state.streams)
        state = self.enter(state, fetch)
        x = self.attention_input(state)
        low_rank = self.write_kv(x, plan, caches)
        return self.finish(x, low_rank, state, plan, caches, cut=cut, trace=trace)
