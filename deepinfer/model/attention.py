"""CSA2 attention of one layer, in two calls: write the caches, then attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from deepinfer.device.ops.indexer import IndexPlan, Selection
from deepinfer.device.runtime import StepKind
from deepinfer.model.caches import ModelCaches
from deepinfer.model.compressor import Compressor
from deepinfer.model.config import V41Config
from deepinfer.model.layer_state import LayerState
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.packing import Packer
from deepinfer.model.step_batch import StepPlan


class Attended(NamedTuple):
    """Output of `attend` and the selection later layers reuse."""

    y: Tensor
    entries: Tensor | None
    slots: Tensor | None
    candidates: Tensor | None


class Attention:
    """Window attention of every layer, plus the compressed entries its mode gives it.

    SWA layers stop at the window. FULL layers also own a compressor and an indexer, REINDEX
    layers an indexer over an earlier source, REUSE layers read the travelling selection.
    """

    def __init__(
        self,
        config: V41Config,
        layer: int,
        ops: ModelOps,
        weights: Packer,
        *,
        rope_table: Tensor,
        index_select: Callable[..., Selection],
    ) -> None:
        """Bind ops and pack weights; `weights` is at the layer's `attn.`.

        `index_select` is the op of that name, or what stands in for it in a measuring run.
        """
        self._index_select = index_select
        self._ops, self._config, self._layer = ops, config, layer
        self._rope_table = rope_table
        self._ratio = config.ratio(layer)
        self._source = config.kv_source(layer)
        # The last KV source writes its caches for all rows but may attend for few (replay), so
        # it does not compute the query projection together with the KV projection.
        self._projects_together = layer != config.last_kv_source
        if self._projects_together:
            self._input = weights.linear("wq_a.weight", "wkv.weight")
        else:
            self._input = weights.linear("wkv.weight")
            self._query_input = weights.linear("wq_a.weight")
        query_names = ["wq_b.weight"]
        self._runs_index = config.runs_index(layer)
        if self._runs_index:
            query_names.append("indexer.wq_b.weight")
            self._head_weights = weights.linear("indexer.weights_proj.weight")
        self._query = weights.linear(*query_names)
        self._output_a = weights.grouped("wo_a.weight", config.o_groups)
        self._output_b = weights.linear("wo_b.weight")
        self._q_norm = weights.vector("q_norm.weight")
        self._kv_norm = weights.vector("kv_norm.weight")
        self._sink = weights.vector("attn_sink")
        self._compressor = (
            Compressor(config, layer, ops, weights) if config.owns_kv(layer) else None
        )

    def write_caches(self, x: Tensor, plan: StepPlan, caches: ModelCaches) -> Tensor | None:
        """Write this layer's window rows and, for a KV source, what its compressor emits.

        Args:
            x: [T, D] normed input of the sublayer.
            plan: the step.
            caches: changed in place. Prefill rows go through the workspace and are committed
                to the rings at once: `attend` reads history and chunk from the workspace.

        Returns:
            [T, q_lora_rank] query projection if it came with the KV projection, else None.
        """
        ops, config, window = self._ops, self._config, plan.window
        projected = ops.linear(x, self._input)
        low_rank = None
        if self._projects_together:
            low_rank, projected = projected.split((config.q_lora_rank, config.head_dim), dim=1)
        kv = ops.rmsnorm(projected, self._kv_norm, config.rms_norm_eps)
        ring = caches.windows[self._layer]
        prefills = plan.batch.kind is StepKind.PREFILL
        target = caches.workspace if prefills else ring
        if prefills:
            ops.copy_rows(ring, window.history_from, window.history_to, destination=target)
        ops.rope_store(kv, plan.rows.positions, window.write, self._rope_table, cache=target)
        if prefills:
            ops.copy_rows(target, window.commit_from, window.commit_to, destination=ring)
        if self._compressor is not None:
            self._compressor.write(x, plan, caches, self._rope_table)
        return low_rank

    def attend(
        self,
        x: Tensor,
        low_rank: Tensor | None,
        state: LayerState,
        plan: StepPlan,
        caches: ModelCaches,
    ) -> Attended:
        """Attend for the rows of the step, after `write_caches` of the same step.

        Args:
            x: [T, D] normed input of the sublayer.
            low_rank: what `write_caches` returned.
            state: travelling selection and candidates.
            plan: the step.
            caches: read only.
        """
        ops, config, rows = self._ops, self._config, plan.rows
        if low_rank is None:
            low_rank = ops.linear(x, self._query_input)
        low_rank = ops.rmsnorm(low_rank, self._q_norm, config.rms_norm_eps)
        queries = ops.linear(low_rank, self._query)
        width = config.num_attention_heads * config.head_dim
        q = queries[:, :width].unflatten(1, (config.num_attention_heads, config.head_dim))
        q = ops.rope(q, rows.positions, self._rope_table, inverse=False)
        entries, slots, candidates = state.entries, state.slots, state.candidates
        if self._runs_index:
            entries, slots, candidates = self._select(x, queries[:, width:], state, plan, caches)
        prefills = plan.batch.kind is StepKind.PREFILL
        o = ops.sparse_attention(
            q,
            caches.workspace if prefills else caches.windows[self._layer],
            plan.window.read,
            None if self._source is None else caches.compressed[self._source],
            None if self._source is None else slots,
            sink=self._sink,
            scale=config.head_dim**-0.5,
        )
        o = ops.rope(o, rows.positions, self._rope_table, inverse=True)
        grouped = o.flatten(1).unflatten(1, (config.o_groups, -1))
        z = ops.grouped_linear(grouped, self._output_a).flatten(1)
        return Attended(ops.linear(z, self._output_b), entries, slots, candidates)

    def _select(
        self,
        x: Tensor,
        index_queries: Tensor,
        state: LayerState,
        plan: StepPlan,
        caches: ModelCaches,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ops, config, batch = self._ops, self._config, plan.batch
        assert self._source is not None  # a layer that runs an indexer reads a source
        per_block = caches.geometry.block_size // self._ratio
        heads, width = config.index_n_heads, config.index_head_dim
        publishes = self._layer == config.candidate_source_layer_id
        has_candidates = publishes or config.searches_candidates(self._layer)
        selection = self._index_select(
            index_queries.unflatten(1, (heads, width)),
            ops.linear(x, self._head_weights) * (width**-0.5 * heads**-0.5),
            plan.rows.positions,
            self._rope_table,
            caches.index[self._source],
            state.candidates if has_candidates else None,
            plan=IndexPlan(
                block_table=batch.block_table,
                row_seq=plan.rows.row_seq,
                visible=plan.compress[self._ratio].visible,
                entries_per_block=per_block,
                max_visible=batch.max_key_len // self._ratio,
                max_query_len=batch.max_query_len,
                topk=config.index_topk,
                num_candidate_blocks=config.candidate_topk_blocks if has_candidates else 0,
                candidate_block_size=config.candidate_block_size,
                publishes_candidates=publishes,
            ),
        )
        slots = ops.entry_slots(selection.entries, plan.rows.row_seq, batch.block_table, per_block)
        return selection.entries, slots, selection.candidates
