"""One stage of the drafter: a window-only layer whose rows see one whole block."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.handles import RowCache
from deepinfer.device.ops.spec import DraftPlan
from deepinfer.model.config import V41Config
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.moe import MoE
from deepinfer.model.packing import Packer
from deepinfer.model.tracing import TraceSink


class DraftState(NamedTuple):
    """Between two stages: streams [n, M, D] and what collapses them, pre [n, M] fp32."""

    streams: Tensor
    pre: Tensor


class DraftStage:
    """Attention over context and block, then the draft experts, each inside mHC."""

    def __init__(
        self,
        config: V41Config,
        stage: int,
        *,
        backend: Backend,
        ops: ModelOps,
        weights: Packer,
        rope_table: Tensor,
    ) -> None:
        """Bind ops and pack weights; `weights` is at `mtp.N.`."""
        self._config, self._ops, self._stage = config, ops, stage
        self._rope_table = rope_table
        self._attn_mhc, self._ffn_mhc = weights.mhc("attn"), weights.mhc("ffn")
        self._attn_norm = weights.vector("attn_norm.weight")
        self._ffn_norm = weights.vector("ffn_norm.weight")
        attn = weights.under("attn.")
        self._input = attn.linear("wq_a.weight", "wkv.weight")
        self._query = attn.linear("wq_b.weight")
        self._output_a = attn.grouped("wo_a.weight", config.o_groups)
        self._output_b = attn.linear("wo_b.weight")
        self._q_norm, self._kv_norm = attn.vector("q_norm.weight"), attn.vector("kv_norm.weight")
        self._sink = attn.vector("attn_sink")
        self._moe = MoE(
            config,
            ops,
            weights.under("ffn."),
            backend.runtime.device,
            num_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )

    def forward(
        self, state: DraftState, plan: DraftPlan, window: RowCache, trace: TraceSink | None = None
    ) -> DraftState:
        """The whole stage for all rows of the blocks.

        Args:
            state: what enters it.
            plan: places of the blocks.
            window: this stage's draft window; the block's scratch rows are written.
            trace: receives streams and expert decisions, or None.

        Source: block pass of DSpark, a V4.1 layer with a bidirectional block.
        """
        config, ops = self._config, self._ops
        if trace is not None:
            trace.record(f"draft.{self._stage}.streams", state.streams)
        x = ops.mhc_collapse_norm(state.streams, state.pre, self._attn_norm, config.rms_norm_eps)
        mix = ops.mhc_mix(
            state.streams,
            self._attn_mhc,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            num_iters=config.hc_sinkhorn_iters,
        )
        boundary = ops.mhc_boundary(
            self._attend(x, plan, window),
            state.streams,
            mix,
            self._ffn_mhc,
            self._ffn_norm,
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            num_iters=config.hc_sinkhorn_iters,
        )
        y, routing = self._moe.forward(boundary.x, plan.valid)
        if trace is not None:
            trace.record(f"draft.{self._stage}.expert_ids", routing.ids)
            trace.record(f"draft.{self._stage}.expert_weights", routing.weights)
        streams = ops.mhc_expand(y, boundary.streams, boundary.mix.post, boundary.mix.comb)
        return DraftState(streams, boundary.mix.pre)

    def _attend(self, x: Tensor, plan: DraftPlan, window: RowCache) -> Tensor:
        config, ops = self._config, self._ops
        low_rank, kv = ops.linear(x, self._input).split(
            (config.q_lora_rank, config.head_dim), dim=1
        )
        kv = ops.rmsnorm(kv, self._kv_norm, config.rms_norm_eps)
        # Every row reads the whole block, so all rows are written before any attends.
        ops.rope_store(kv, plan.positions, plan.write, self._rope_table, cache=window)
        queries = ops.linear(ops.rmsnorm(low_rank, self._q_norm, config.rms_norm_eps), self._query)
        q = queries.unflatten(1, (config.num_attention_heads, config.head_dim))
        o = ops.sparse_attention(
            ops.rope(q, plan.positions, self._rope_table, inverse=False),
            window,
            plan.read,
            None,
            None,
            sink=self._sink,
            scale=config.head_dim**-0.5,
        )
        o = ops.rope(o, plan.positions, self._rope_table, inverse=True)
        grouped = o.flatten(1).unflatten(1, (config.o_groups, -1))
        z = ops.grouped_linear(grouped, self._output_a).flatten(1)
        return ops.linear(z, self._output_b)
